"""OP-6 and OP-8: the order of rows, its copies there and back, and the weighted sum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from src.kernels.combine import combine
from src.kernels.permute import permute
from src.kernels.sort_by_expert import sort_by_expert

E, T, K, D = 7, 23, 3, 5
Function = Callable[..., Tensor]


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
def test_op_6_copies_and_the_sum_that_is_their_gradient(name: str) -> None:
    check_permute(permute, routings()[name])


@pytest.mark.parametrize("name", routings())
def test_op_6_rows_are_combined_where_they_lie(name: str) -> None:
    check_combine(combine, routings()[name])


def check_permute(function: Function, ids: Tensor, dtype: torch.dtype = torch.float64) -> None:
    """Against a loop over slots, of which every third token has one without a row."""
    tokens, top_k = ids.shape
    order = sort_by_expert(ids, E).row_slot_N.long()
    order = order[(order % top_k != 1) | (order // top_k % 3 != 0)]
    slots = torch.full((tokens * top_k,), len(order)).scatter(0, order, torch.arange(len(order)))
    x = torch.randn(tokens, D, dtype=dtype, requires_grad=True)
    upstream = torch.randn(len(order), D, dtype=dtype)
    rows = function(x, (order // top_k).int(), slots.view(tokens, top_k).int())
    (dx,) = torch.autograd.grad(rows, x, upstream)
    want = torch.zeros_like(x)
    for slot, row in enumerate(slots.tolist()):
        if row < len(order):
            want[slot // top_k] += upstream[row]
            assert torch.equal(rows[row], x[slot // top_k])
    close(dx, want)


def check_combine(function: Function, ids: Tensor, dtype: torch.dtype = torch.float64) -> None:
    """Values and every gradient of a loop over slots; gradients may be expanded views, and indices int64."""
    tokens, top_k = ids.shape
    slots = sort_by_expert(ids, E).slot_row_N.view(ids.shape)
    shapes = ((ids.numel(), D), (tokens, top_k), (tokens, D))
    y, weights, residual = (torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes)
    upstream = torch.randn(tokens, 1, dtype=dtype).expand(tokens, D)
    out = function(y, slots.long(), weights, residual)
    found = torch.autograd.grad(out, (y, weights, residual), upstream)
    dy, dweights = torch.zeros_like(y), torch.zeros_like(weights)
    want = residual.detach().clone()
    for slot, row in enumerate(slots.flatten().tolist()):
        token, k = divmod(slot, top_k)
        want[token] += weights[token, k].detach() * y[row].detach()
        dy[row] = weights[token, k].detach() * upstream[token]
        dweights[token, k] = (upstream[token] * y[row].detach()).sum()
    for ours, theirs in zip((out, *found), (want, dy, dweights, upstream), strict=True):
        close(ours, theirs)


def close(found: Tensor, want: Tensor) -> None:
    limit = 1e-13 if found.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found, want, rtol=limit, atol=limit)


def without_weights_gradient(y: Tensor, slots: Tensor, weights: Tensor, residual: Tensor) -> Tensor:
    return combine(y, slots, weights.detach(), residual) + 0 * weights.sum()


def neighbours_row(y: Tensor, slots: Tensor, weights: Tensor, residual: Tensor) -> Tensor:
    return combine(y, slots.roll(1, 1), weights, residual)


@pytest.mark.parametrize("mutant", [without_weights_gradient, neighbours_row])
def test_num_6_mutations_of_combine_are_noticed(mutant: Function) -> None:
    with pytest.raises(AssertionError):
        check_combine(mutant, routings()["random"])


def test_num_6_mutation_a_slot_without_a_row_takes_the_last() -> None:
    def mutant(x: Tensor, tokens: Tensor, slots: Tensor) -> Tensor:
        return permute(x, tokens, slots.clamp(max=len(tokens) - 1))

    with pytest.raises(AssertionError):
        check_permute(mutant, routings()["random"])


HERE = torch.arange(3, dtype=torch.int32)[None]


def test_combine_sums_in_ascending_order_onto_the_residual() -> None:
    """In fp32 the order of the sum shows: 1e8 must meet 1 before -1e8 does."""
    y = torch.tensor([[1e8], [1.0], [-1e8]])
    assert combine(y, HERE, torch.ones(1, 3), torch.zeros(1, 1)).item() == 0.0
    assert combine(y, HERE[:, [0, 2, 1]], torch.ones(1, 3), torch.zeros(1, 1)).item() == 1.0


def test_combine_rounds_bf16_once() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(T, K, D, generator=generator).bfloat16()
    weights, residual = (
        torch.rand(T, K, generator=generator),
        torch.randn(T, D, generator=generator).bfloat16(),
    )
    exact = residual.double() + (weights.double()[..., None] * y.double()).sum(1)
    found = combine(y.flatten(0, 1), torch.arange(T * K).view(T, K), weights, residual)
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).abs().max() <= 2**-8 * exact.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cmp_4_combine_keeps_its_gradients_in_a_graph(dtype: torch.dtype) -> None:
    """All three were zero where torch 2.11 compiled it in fp32."""
    torch.compiler.reset()
    draws = torch.Generator().manual_seed(0)
    y, residual = (torch.randn(shape, generator=draws).to(dtype) for shape in ((T * K, D), (T, D)))
    slots = torch.randperm(T * K, generator=draws).int().view(T, K)
    leaves = [x.requires_grad_() for x in (y, torch.rand(T, K, generator=draws), residual)]
    compiled = torch.compile(combine, fullgraph=True, dynamic=False, backend="aot_eager")
    found, want = (
        torch.autograd.grad(function(leaves[0], slots, *leaves[1:]).float().square().sum(), leaves)
        for function in (compiled, combine)
    )
    assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))
