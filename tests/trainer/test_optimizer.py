"""The update against formulas written out, and the masked bad step (ENG-7, ENG-27)."""

import pytest
import torch

from src.config import OptimizerConfig
from src.models.build import ParamSpec
from src.trainer.optimizer import Optimizer, clip_factor

DECAY = ParamSpec(init="normal", std=0.02, expert=False, decay=True)
PLAIN = ParamSpec(init="ones", std=0.0, expert=False, decay=False)


def make(config: OptimizerConfig) -> tuple[dict[str, torch.Tensor], Optimizer]:
    torch.manual_seed(3)
    parameters = {n: torch.nn.Parameter(torch.randn(5, 3, dtype=torch.float64)) for n in ("weight", "norm")}
    return parameters, Optimizer(config, parameters, {"weight": DECAY, "norm": PLAIN})


def gradients(parameters: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    out = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in parameters.items()}
    for name, parameter in parameters.items():
        parameter.grad = out[name].clone()
    return out


def test_adamw_equals_its_formula_and_spares_norms_from_decay() -> None:
    config = OptimizerConfig(kind="adamw", lr=0.1, weight_decay=0.3, betas=[0.8, 0.95], eps=1e-7)
    parameters, optimizer = make(config)
    weights = {n: p.detach().clone() for n, p in parameters.items()}
    first = {n: torch.zeros_like(w) for n, w in weights.items()}
    second = {n: torch.zeros_like(w) for n, w in weights.items()}
    for step in range(1, 4):
        for name, gradient in gradients(parameters, step).items():
            gradient = gradient * 0.5
            first[name] = 0.8 * first[name] + 0.2 * gradient
            second[name] = 0.95 * second[name] + 0.05 * gradient**2
            decay = 0.3 if name == "weight" else 0.0
            move = (first[name] / (1 - 0.8**step)) / ((second[name] / (1 - 0.95**step)).sqrt() + 1e-7)
            weights[name] = weights[name] * (1 - 0.1 * decay) - 0.1 * move
        optimizer.step(0.1, torch.tensor(0.5, dtype=torch.float64), torch.zeros(()))
        optimizer.zero_grad()
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach(), weights[name], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(optimizer.moments["exp_avg"][name], first[name], rtol=1e-12, atol=1e-12)
    assert optimizer.updates == 3


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_skipped_step_leaves_every_bit(kind: str) -> None:
    """ENG-27: one NaN in one gradient element, and parameters, moments and step count stay bitwise."""
    parameters, optimizer = make(OptimizerConfig(kind=kind, lr=0.1, momentum=0.9))
    gradients(parameters, 1)
    optimizer.step(0.1, None, torch.zeros(()))
    before = {n: p.detach().clone() for n, p in parameters.items()}
    moments = {m: {n: t.clone() for n, t in ts.items()} for m, ts in optimizer.moments.items()}
    updates = optimizer.updates
    gradients(parameters, 2)
    parameters["weight"].grad[2, 1] = float("nan")
    optimizer.step(0.1, torch.tensor(float("nan"), dtype=torch.float64), torch.ones(()))
    assert all(torch.equal(before[n], p.detach()) for n, p in parameters.items())
    assert all(torch.equal(moments[m][n], t) for m, ts in optimizer.moments.items() for n, t in ts.items())
    assert optimizer.updates == updates


def test_moments_exist_before_the_first_step() -> None:
    """CKPT-3: a checkpoint needs tensors to load into."""
    _, optimizer = make(OptimizerConfig(kind="adamw"))
    assert set(optimizer.moments) == {"exp_avg", "exp_avg_sq"}
    assert set(optimizer.moments["exp_avg"]) == {"weight", "norm"}


def test_a_missing_gradient_is_an_error_not_a_skip() -> None:
    parameters, optimizer = make(OptimizerConfig(kind="sgd"))
    gradients(parameters, 1)
    parameters["norm"].grad = None
    with pytest.raises(AssertionError, match="norm has no gradient"):
        optimizer.step(0.1, None, torch.zeros(()))


def test_clip_factor() -> None:
    assert clip_factor(torch.tensor(4.0), 1.0).item() == pytest.approx(1 / (4 + 1e-6))
    assert clip_factor(torch.tensor(0.5), 1.0).item() == 1.0
    assert clip_factor(torch.tensor(0.5), None) is None
