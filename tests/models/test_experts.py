"""ENG-19: rows past the counts, as alignment makes them, change nothing in experts with biases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from src.models.layers import BiasedExperts
from tests.kernels.test_expert_bias import pad_bias
from tests.models import odd
from tests.models.tools import gradients, make

COUNTS = [4, 0, 7, 1, 3]
TAIL = 6


def experts_of(kernels: str) -> BiasedExperts:
    model, _ = make(odd.gpt_oss(), kernels=kernels)
    experts = model.model.layers["1"].mlp.experts
    assert isinstance(experts, BiasedExperts)
    return experts


def step(experts: BiasedExperts, rows: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, gradient of the rows and of the parameters."""
    experts.zero_grad()
    leaf = rows.clone().requires_grad_()
    out = experts(leaf, torch.tensor(COUNTS, dtype=torch.int32))
    out.backward(upstream)
    assert leaf.grad is not None
    return out.detach(), leaf.grad, {name: grad.clone() for name, grad in gradients(experts).items()}


@pytest.mark.parametrize("kernels", ["eager", "auto"])
def test_eng_19_rows_past_the_counts(kernels: str) -> None:
    """They hold NaN, and so does their gradient; the output there is zero, and nothing else moves a bit."""
    check(experts_of(kernels))


def check(experts: BiasedExperts) -> None:
    rows = torch.randn(sum(COUNTS), 36, generator=torch.Generator().manual_seed(1))
    upstream = torch.randn(sum(COUNTS), 36, generator=torch.Generator().manual_seed(2))
    nothing = torch.full((TAIL, 36), torch.nan)
    out, back, grads = step(experts, torch.cat((rows, nothing)), torch.cat((upstream, nothing)))
    want, want_back, want_grads = step(experts, rows, upstream)
    assert torch.equal(out, torch.cat((want, torch.zeros(TAIL, 36))))
    assert torch.equal(back, torch.cat((want_back, torch.zeros(TAIL, 36))))
    for name, grad in grads.items():
        assert torch.allclose(grad, want_grads[name], rtol=1e-5, atol=1e-6), name
        assert not grad[1].any(), f"{name} of the expert without rows"


def test_eng_19_pad_bias_is_noticed() -> None:
    """Alignment rows that take the last expert's bias."""
    experts = experts_of("eager")
    experts.ops = replace(experts.ops, expert_bias=pad_bias)
    with pytest.raises(AssertionError):
        check(experts)
