"""OP-12, ENG-19: each expert's bias on its own rows; rows past the last offset take none and give none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from src.kernels.expert_bias import expert_bias
from tests.kernels.test_grouped_mm import LOADS, offsets

M, TAIL = 7, 3


def pad_bias(rows_RM: Tensor, bias_EM: Tensor, offs_E: Tensor) -> Tensor:
    """Rows past the last offset taken for the last expert's."""
    return expert_bias(rows_RM, bias_EM, torch.cat((offs_E[:-1], offs_E.new_tensor([rows_RM.shape[0]]))))


def neighbour(rows_RM: Tensor, bias_EM: Tensor, offs_E: Tensor) -> Tensor:
    return expert_bias(rows_RM, bias_EM.roll(1, 0), offs_E)


@pytest.mark.parametrize("load", LOADS)
def test_op_12_values_and_gradients(load: str) -> None:
    """Against a loop in fp64; the tail holds NaN, in rows and in the gradient that arrives."""
    check(expert_bias, LOADS[load])


def check(
    function: Callable[[Tensor, Tensor, Tensor], Tensor],
    counts: list[int],
    dtype: torch.dtype = torch.float64,
) -> None:
    total, experts = sum(counts), len(counts)
    generator = torch.Generator().manual_seed(total)
    rows = torch.randn(total + TAIL, M, generator=generator, dtype=dtype)
    bias = torch.randn(experts, M, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(total + TAIL, M, generator=generator, dtype=dtype)
    rows[total:] = torch.nan
    weight[total:] = torch.nan
    rows.requires_grad_()
    out = function(rows, bias, offsets(counts))
    out.backward(weight)
    groups = rows.detach()[:total].split(counts)
    want = torch.cat([group + b for group, b in zip(groups, bias.detach(), strict=True)])
    assert torch.equal(out[:total], want)
    assert not out[total:].any()
    assert rows.grad is not None
    assert bias.grad is not None
    assert torch.equal(rows.grad[:total], weight[:total])
    assert not rows.grad[total:].any()
    sums = torch.stack([part.double().sum(0) for part in weight[:total].split(counts)])
    close = 1e-13 if dtype == torch.float64 else 1e-5
    assert torch.allclose(bias.grad.double(), sums, rtol=close, atol=close)
    assert not bias.grad[[e for e, n in enumerate(counts) if n == 0]].any()


@pytest.mark.parametrize("mutant", [pad_bias, neighbour])
def test_num_6_mutations_are_noticed(mutant: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(AssertionError):
        check(mutant, LOADS["uneven"])


def test_no_rows_keep_the_graph() -> None:
    rows, bias = torch.empty(0, M, requires_grad=True), torch.ones(4, M, requires_grad=True)
    grads = torch.autograd.grad(expert_bias(rows, bias, offsets([0] * 4)).sum(), (rows, bias))
    assert not any(grad.any() for grad in grads)


def test_bf16_sums_are_rounded_once() -> None:
    """A thousand rows: a sum kept in bf16 would stop at 256."""
    bias = torch.zeros(2, M, dtype=torch.bfloat16, requires_grad=True)
    out = expert_bias(torch.zeros(1500, M, dtype=torch.bfloat16), bias, offsets([500, 1000]))
    (grad,) = torch.autograd.grad(out.sum(), bias)
    assert grad.tolist() == [[500.0] * M, [1000.0] * M]
