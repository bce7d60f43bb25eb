"""FP8-1, FP8-5: runs whose products are in fp8, and weights that are quantised once a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from src.config import (
    BackendConfig,
    Config,
    KernelsConfig,
    MeshConfig,
    OptimizerConfig,
    PlatformConfig,
    PrecisionConfig,
    RecomputeConfig,
)
from src.errors import UserError
from src.kernels.declaration import Device
from src.kernels.fp8 import MULTIPLE, Quantised
from src.kernels.quantise_weight import quantise_weight
from src.kernels.registry import choose
from src.models.build import needs
from src.models.layers import Experts, Linear
from src.trainer.backends.native import NativeBackend
from src.trainer.data.corpus import open_data
from src.trainer.data.loader import Loader
from src.trainer.loop import build
from src.trainer.optimizer import Optimizer
from src.trainer.parallel.precision import precision_of
from src.trainer.parallel.quantised import QuantisedWeights, check_fp8
from src.trainer.runtime import start
from src.trainer.step import train_step
from src.trainer.stop import StopRequest
from src.validate import validate
from src.validate_fp8 import MULTIPLE as VALIDATED
from tests.models.odd import deepseek_v2, dense
from tests.models.tools import relative
from tests.trainer.small import lines, run_here, small_config


def config_of(root: Path, precision: str, fp8: str, recipe: str = "tensor", **changes: Any) -> Config:
    """A mixture with two layers of experts; widths are odd, as the reference does not mind."""
    options = PrecisionConfig(name=precision, fp8=fp8, fp8_recipe=recipe)
    adamw = OptimizerConfig(kind="adamw", lr=1e-2)
    return small_config(root, precision=options, optimizer=adamw, **changes)


RUNS = [("master", "dense", "tensor"), ("split", "dense", "row"), ("bf16", "dense_experts", "tensor")]


@pytest.mark.parametrize(
    ("precision", "fp8", "recipe"), [RUNS[0], *(pytest.param(*r, marks=pytest.mark.slow) for r in RUNS[1:])]
)
def test_fp8_1_a_run_falls_as_in_bf16(tmp_path: Path, precision: str, fp8: str, recipe: str) -> None:
    """Twenty steps: each loss within 3 % of the run in bf16, and not the same."""
    losses = {}
    for name in ("none", fp8):
        model = deepseek_v2(num_layers=2) if fp8 == "dense_experts" else dense(num_layers=2)
        named = recipe if name != "none" else "tensor"
        config = config_of(tmp_path, precision, name, named, model=model, max_steps=20)
        config.optimizer.lr, config.checkpoint.final = 4e-3, False
        run_here(config, tmp_path / name)
        losses[name] = [line["loss"] for line in lines(tmp_path / name)]
    assert losses[fp8] == pytest.approx(losses["none"], rel=0.03)
    assert losses[fp8] != losses["none"]
    assert losses[fp8][-1] < 0.95 * losses[fp8][0]


class Trial:
    """A backend and its update, a step at a time."""

    def __init__(self, config: Config) -> None:
        self.config, self.runtime = config, start(config)
        self.backend = NativeBackend.build(config, self.runtime)
        self.optimizer = Optimizer(
            config.optimizer, self.backend.parameters, self.backend.specs, self.backend.ops.adamw,
            self.backend.copies, self.backend.remainders,
            precision_of(config, self.runtime.device).first_moment,
        )  # fmt: skip
        self._loader = Loader(config, open_data(config, None), 0, 1, 0)
        self._data = open_data(config, None)
        self._no_skip = torch.zeros((), device=self.runtime.device)

    def forward_backward(self) -> Tensor:
        batch = self._loader.read(0)
        tokens = torch.tensor(batch.target_tokens, device=self.runtime.device)
        return self.backend.forward_backward(batch, tokens).loss

    def update(self) -> None:
        self.optimizer.step(0.1, None, self._no_skip)

    def evaluate(self) -> Tensor:
        return self.backend.evaluate(self._data.train.micro_batch([0]))

    def pairs(self) -> list[tuple[Tensor, Quantised]]:
        """Weights as they compute, and what was lent."""
        found = []
        for part in self.backend._model.modules():
            if isinstance(part, Linear) and part.fp8 is not None:
                found.append((part.weight, part.fp8))
            if isinstance(part, Experts) and part.fp8 is not None:
                found += list(zip((part.gate_up, part.down), part.fp8, strict=True))
        return found

    def is_fresh(self) -> bool:
        """Whether all that was lent is made of the weights as they are."""
        return all(
            torch.equal(ours.float(), theirs.float())
            for weight, lent in self.pairs()
            for ours, theirs in zip(lent, quantise_weight(weight, lent.rows_scale.dim() > 0), strict=True)
        )


def stays_fresh(trial: Trial) -> bool:
    """Through updates, an evaluation and a write from outside."""
    seen = []
    for _ in range(2):
        trial.forward_backward()
        seen.append(trial.is_fresh())
        trial.update()
    assert not trial.is_fresh(), "the update changed nothing"
    trial.evaluate()
    seen.append(trial.is_fresh())
    for entry in trial.backend.local_entries().values():
        for _, view in entry.parts:
            view.copy_(torch.full(view.shape, 0.375))
    trial.evaluate()
    written = {float((lent.rows.float() * lent.rows_scale[..., None]).mean()) for _, lent in trial.pairs()}
    return all([*seen, trial.is_fresh(), written == {0.375}])


@pytest.mark.parametrize("precision", ["master", "split", "bf16"])
def test_fp8_5_weights_follow_the_update_and_a_load(tmp_path: Path, precision: str) -> None:
    """Under `split` what computes is the upper half that the update writes itself."""
    trial = Trial(config_of(tmp_path, precision, "dense_experts"))
    assert stays_fresh(trial)
    names = [n for n, p in trial.backend._model.named_modules() if isinstance(p, Linear) and p.fp8 is None]
    assert names == ["lm_head"]


def test_fp8_5_mutation_stale_weights_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QuantisedWeights, "touch", lambda weights: None)
    assert not stays_fresh(Trial(config_of(tmp_path, "master", "dense")))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_fp8_5_weights_are_quantised_once_a_step(tmp_path: Path, recompute: str) -> None:
    """Whatever the micro-batches, evaluations and recomputations; into memory that stays where it is."""
    config = config_of(tmp_path, "master", "dense_experts", recompute=RecomputeConfig(recompute))
    trial = Trial(config)
    calls = []

    def counted(weight: Tensor, *rest: Any) -> Quantised:
        calls.append(weight)
        return quantise_weight(weight, *rest)

    assert trial.backend._fp8 is not None
    trial.backend._fp8._quantise = counted
    trial.forward_backward()
    once = len(calls)
    places = [x.data_ptr() for _, lent in trial.pairs() for x in lent]
    assert once == len(trial.pairs()) > 0
    trial.update()
    trial.evaluate()
    trial.evaluate()
    trial.forward_backward()
    assert len(calls) == 2 * once
    assert places == [x.data_ptr() for _, lent in trial.pairs() for x in lent]


def test_fp8_1_reaches_every_gradient_and_recomputes_alike(tmp_path: Path) -> None:
    """MOE-1: bitwise the gradients without recomputation; fp8 errs by some per cent, not by nothing."""
    found = {}
    for fp8, recompute in (("none", "none"), ("dense_experts", "none"), ("dense_experts", "full")):
        trial = Trial(config_of(tmp_path, "bf16", fp8, recompute=RecomputeConfig(recompute)))
        trial.forward_backward()
        found[fp8, recompute] = {n: p.grad for n, p in trial.backend.parameters.items() if p.grad is not None}
    plain, ours, again = found.values()
    assert plain.keys() == ours.keys() == again.keys()
    for name, gradient in ours.items():
        assert torch.equal(gradient, again[name]), name
        assert 1e-4 < relative(gradient, plain[name]) < 0.5, name
    whole = [torch.cat([g.flatten() for g in of.values()]) for of in (ours, plain)]
    assert relative(*whole) < 0.15


GOOD = PrecisionConfig(name="bf16", fp8="dense")
WIDE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 48}


def problems(root: Path, **changes: Any) -> list[str]:
    config = small_config(root, **({"precision": GOOD, "model": dense(**WIDE)} | changes))
    return [str(problem) for problem in validate(config) if problem.rule == "FP8-1"]


def test_fp8_1_refusals_at_composition(tmp_path: Path) -> None:
    """One sentence for each thing, with both values and the fix; what works passes."""
    assert VALIDATED == MULTIPLE
    assert problems(tmp_path) == []
    every = problems(
        tmp_path,
        precision=PrecisionConfig(name="fp32", fp8="dense_experts"),
        backend=BackendConfig(name="transformers"),
        model=dense(),
    )
    for words in (
        "dense_experts goes with bf16 products, and precision=fp32 has none",
        "dense_experts, but the products of backend=transformers are its own",
        "dense_experts, but odd has no experts",
        "self_attn.q_proj.weight 60x42",
    ):
        assert sum(words in problem for problem in every) == 1, words
    assert len(every) == 4
    on_cpu = PrecisionConfig(name="auto", fp8="dense")
    (found,) = problems(tmp_path, precision=on_cpu, platform=PlatformConfig(name="cpu"))
    assert "precision=auto, fp32 on a CPU" in found
    (found,) = problems(tmp_path, precision=PrecisionConfig(name="bf16", fp8_recipe="row"))
    assert "row, but precision.fp8=none" in found
    (found,) = problems(tmp_path, model=deepseek_v2(hidden_size=64))
    assert "mlp.gate.weight" not in found
    assert "experts.gate_up" not in found
    (found,) = problems(
        tmp_path, model=deepseek_v2(), precision=PrecisionConfig(name="bf16", fp8="dense_experts")
    )
    assert "mlp.experts.gate_up 18x45" in found


@pytest.mark.parametrize(("arch", "names"), [("sm80", ["linear_fp8", "grouped_mm_fp8"]), ("sm90", [])])
def test_fp8_1_a_device_without_such_products(tmp_path: Path, arch: str, names: list[str]) -> None:
    """Refused with what is missing, unless the reference is asked for by name."""
    config = small_config(tmp_path, precision=PrecisionConfig(name="bf16", fp8="dense_experts"))

    def asked(kernels: KernelsConfig) -> Callable[[], None]:
        mine = replace(config, kernels=kernels)
        ops = choose(kernels, Device("cuda", arch), torch.bfloat16, config.determinism, needs(config.model))
        return lambda: check_fp8(mine, ops, torch.bfloat16)

    asked(KernelsConfig(name="eager"))()
    if not names:
        asked(KernelsConfig())()
        return
    with pytest.raises(UserError, match=r"scaled_mm runs on .*, not on sm80") as caught:
        asked(KernelsConfig())()
    assert caught.value.code == 3
    assert [name for name in names if f"kernels.{name}=eager" in str(caught.value)] == names


def test_fp8_1_a_device_that_computes_in_fp32(tmp_path: Path) -> None:
    config = small_config(tmp_path, precision=PrecisionConfig(name="auto", fp8="dense"))
    with pytest.raises(UserError, match=r"precision=auto computes in torch\.float32 here") as caught:
        NativeBackend.choose_ops(config, torch.device("cpu"))
    assert caught.value.code == 3


def test_fp8_1_experts_run_stage_by_stage(tmp_path: Path) -> None:
    """No fused layer of experts is taken where their products are to run in fp8."""
    config = small_config(tmp_path, precision=PrecisionConfig(name="bf16", fp8="dense_experts"))
    ops = NativeBackend.choose_ops(config, torch.device("cpu"))
    assert not ops.fuses_experts
    kernels = KernelsConfig(local_experts="quack")
    with pytest.raises(UserError, match="local_experts"):
        NativeBackend.choose_ops(replace(config, kernels=kernels), torch.device("cpu"))


def test_memory_counts_weights_in_fp8(tmp_path: Path) -> None:
    """PROJ-1: two bytes for each weight whose products run in fp8."""
    from src.launchers.memory import rank_memory

    none, some = (
        rank_memory(config_of(tmp_path, "bf16", fp8, mesh=MeshConfig("single")), 0, "cpu").weights
        for fp8 in ("none", "dense_experts")
    )
    trial = Trial(config_of(tmp_path, "bf16", "dense_experts"))
    trial.forward_backward()
    assert some - none == sum(lent.rows.numel() + lent.columns.numel() for _, lent in trial.pairs())


def on_a_gpu(root: Path, precision: PrecisionConfig, **changes: Any) -> Config:
    """A mixture whose widths every CUDA kernel takes."""
    model = deepseek_v2(
        hidden_size=64, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16,
        v_head_dim=32, num_heads=4, intermediate_size=48, num_experts=8, num_groups=1, groups_kept=1,
        top_k=2, expert_size=32, vocab_size=128,
    )  # fmt: skip
    options: dict[str, Any] = {"model": model, "sequence_length": 64, "precision": precision}
    batch = {"global_batch_size": 4, "micro_batch_size": 2}
    config = small_config(root, **(options | batch | changes))
    assert [problem for problem in validate(config) if problem.rule == "FP8-1"] == []
    return config


def gradients(config: Config) -> dict[str, Tensor]:
    trial = Trial(config)
    loss = trial.forward_backward()
    held = trial.backend.parameters.items()
    trial.runtime.close()
    return {"loss": loss.double()} | {n: p.grad.double() for n, p in held if p.grad is not None}


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "fp8", "recipe"), RUNS)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_fp8_1_layers_on_a_gpu(tmp_path: Path, precision: str, fp8: str, recipe: str, recompute: str) -> None:
    """CMP-4: eager and compiled, against fp64 no worse than twice the reference, every gradient."""
    torch._dynamo.reset()
    options = PrecisionConfig(name=precision, fp8=fp8, fp8_recipe=recipe)
    config = on_a_gpu(tmp_path, options, recompute=RecomputeConfig(recompute))
    plain = replace(config, precision=PrecisionConfig(name="fp64"), backend=BackendConfig(compile="none"))
    exact = gradients(plain)
    emulated = gradients(replace(config, kernels=KernelsConfig(name="eager"), backend=plain.backend))
    for form in ("none", "layers"):
        found = gradients(replace(config, backend=BackendConfig(compile=form)))
        assert found.keys() == exact.keys()
        for name, want in exact.items():
            assert relative(found[name], want) < 2 * relative(emulated[name], want) + 5e-2, (form, name)
        assert relative(found["loss"], exact["loss"]) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["master", "split"])
def test_bench_5_a_warm_step_in_fp8_waits_for_nothing(tmp_path: Path, precision: str) -> None:
    """ENG-8, CMP-3: weights that are quantised anew bring neither a wait nor another graph."""
    torch._dynamo.reset()
    config = on_a_gpu(tmp_path, PrecisionConfig(name=precision, fp8="dense_experts"), max_steps=20)
    config.optimizer.kind, config.optimizer.lr = "adamw", 1e-3
    directory = tmp_path / "run"
    (directory / "control").mkdir(parents=True)
    runtime = start(config)
    run = build(config, directory, 1, runtime, StopRequest(directory / "control"))
    with Loader(config, run.data, 0, 1, 0) as loader:
        for _ in range(10):  # Samples with and without pads are compiled apart.
            train_step(run, loader, ())
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.compiler.set_stance("fail_on_recompile"):
                for _ in range(3):
                    train_step(run, loader, ())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    runtime.close()
