"""OP-6 and OP-8: the order of rows, its copies there and back, and the weighted sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from src.kernels.combine import combine
from src.kernels.permute import permute, unpermute
from src.kernels.sort_by_expert import sort_by_expert

E, T, K, D = 7, 23, 3, 5


def routings() -> dict[str, Tensor]:
    """Degenerate and random choices of experts, int32 [T,K]."""
    scores = torch.rand(T, E, generator=torch.Generator().manual_seed(0))
    return {
        "random": scores.argsort(1)[:, :K].int(),
        "all the same": torch.tensor([[6, 0, 3]] * T, dtype=torch.int32),
        "one expert": torch.full((T, 1), 4, dtype=torch.int32),
        "no tokens": torch.empty(0, K, dtype=torch.int32),
    }


@pytest.mark.parametrize("name", routings())
def test_op_8_rows_are_ordered_by_expert_then_slot(name: str) -> None:
    ids = routings()[name]
    order = sort_by_expert(ids, E)
    flat = ids.flatten().tolist()
    expected = sorted(range(len(flat)), key=lambda slot: (flat[slot], slot))
    assert order.row_slot_N.tolist() == expected
    assert [order.slot_row_N.tolist()[slot] for slot in expected] == list(range(len(flat)))
    assert order.offs_E.tolist() == [sum(e <= expert for e in flat) for expert in range(E)]
    assert {part.dtype for part in order} == {torch.int32}


@pytest.mark.parametrize("name", routings())
def test_op_6_copies_are_adjoint_and_return_each_row_home(name: str) -> None:
    """⟨P x, y⟩ = ⟨x, Pᵀ y⟩ for both copies, and unpermute(permute(x)) repeats each token K times."""
    ids = routings()[name]
    top_k = ids.shape[1]
    order = sort_by_expert(ids, E)
    plan = (order.row_slot_N, order.slot_row_N, top_k)
    x = torch.randn(ids.shape[0], D, dtype=torch.float64, requires_grad=True)
    y = torch.randn(ids.numel(), D, dtype=torch.float64, requires_grad=True)
    rows = permute(x, *plan)
    assert torch.equal(unpermute(rows, *plan), x[:, None].expand(-1, top_k, -1))
    (dx,) = torch.autograd.grad((rows * y.detach()).sum(), x, retain_graph=True)
    assert torch.allclose((rows * y).sum(), (x * dx).sum(), rtol=1e-12)
    target = torch.randn(ids.shape[0], top_k, D, dtype=torch.float64)
    home = unpermute(y, *plan)
    (dy,) = torch.autograd.grad((home * target).sum(), y, retain_graph=True)
    assert torch.allclose((home * target).sum(), (y * dy).sum(), rtol=1e-12)


def test_combine_sums_in_ascending_order_onto_the_residual() -> None:
    """In fp32 the order of the sum shows: 1e8 must meet 1 before -1e8 does."""
    y = torch.tensor([[[1e8], [1.0], [-1e8]]])
    assert combine(y, torch.ones(1, 3), torch.zeros(1, 1)).item() == 0.0
    assert combine(y[:, [0, 2, 1]], torch.ones(1, 3), torch.zeros(1, 1)).item() == 1.0


def test_combine_rounds_bf16_once() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(T, K, D, generator=generator).bfloat16()
    weights, residual = (
        torch.rand(T, K, generator=generator),
        torch.randn(T, D, generator=generator).bfloat16(),
    )
    exact = residual.double() + (weights.double()[..., None] * y.double()).sum(1)
    found = combine(y, weights, residual)
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).abs().max() <= 2**-8 * exact.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cmp_4_combine_keeps_its_gradients_in_a_graph(dtype: torch.dtype) -> None:
    """All three were zero where torch 2.11 compiled it in fp32."""
    torch.compiler.reset()
    draws = torch.Generator().manual_seed(0)
    y, residual = (torch.randn(shape, generator=draws).to(dtype) for shape in ((T, K, D), (T, D)))
    leaves = [x.requires_grad_() for x in (y, torch.rand(T, K, generator=draws), residual)]
    compiled = torch.compile(combine, fullgraph=True, dynamic=False, backend="aot_eager")
    found, want = (
        torch.autograd.grad(function(*leaves).float().square().sum(), leaves)
        for function in (compiled, combine)
    )
    assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))
