"""FP8-1, FP8-4: references and the library's product on a CPU, against fp64 arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from src.kernels import fp8, grouped_mm_fp8, linear_fp8
from src.kernels.quantise_weight import quantise_weight
from tests.kernels import fp8_oracle
from tests.kernels.parity import relative

BOUND = {torch.float32: 1e-6, torch.bfloat16: 4e-3}


def drawn(*shape: int, dtype: torch.dtype, std: float = 1.0, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(std)
    x.view(-1)[::97] *= 20
    return x.to(dtype)


def results(function: Callable[..., Any], inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def same(found: list[Tensor], want: list[Tensor], dtype: torch.dtype) -> None:
    for index, (ours, theirs) in enumerate(zip(found, want, strict=True)):
        assert ours.dtype == dtype, index
        assert relative(ours, theirs) < BOUND[dtype], (index, relative(ours, theirs))


def check_projection(function: Callable[..., Any], by_rows: bool, dtype: torch.dtype) -> None:
    x, w, b = drawn(37, 48, dtype=dtype), drawn(80, 48, dtype=dtype, std=0.05), drawn(80, dtype=dtype)
    dy = drawn(37, 80, dtype=dtype, std=1e-7, seed=1)
    found = results(lambda x, w, b: function(x, w, quantise_weight(w, by_rows), b), [x, w, b], dy)
    same(found, fp8_oracle.linear(x, w, b, dy, by_rows), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_rows", [False, True])
def test_fp8_1_projection(by_rows: bool, dtype: torch.dtype) -> None:
    """Value, gradients of input, weight and bias; rows that are no multiple of 16."""
    check_projection(linear_fp8.linear_fp8, by_rows, dtype)


def test_fp8_4_projection_by_the_library() -> None:
    """torch 2.11 has no product by rows on a CPU."""
    check_projection(linear_fp8.scaled_mm, False, torch.bfloat16)


def test_fp8_1_mutation_a_scale_dropped_in_the_gradient_of_the_weight() -> None:
    def without(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *rest: Any) -> Tensor:
        of_weight = a.dtype == fp8.E5M2 and b.shape[0] == 48 and b.shape[1] != 80
        return linear_fp8.reference_product(a, b, scale_a, scale_b * 0 + 1 if of_weight else scale_b, *rest)

    with pytest.raises(AssertionError, match=r"\(2, "):
        check_projection(linear_fp8._differentiable(without), False, torch.float32)


@pytest.mark.parametrize("by_rows", [False, True])
def test_fp8_4_weights_are_the_nearest_numbers(by_rows: bool) -> None:
    """Both forms, each with its scales; stacks expert by expert where these are by rows."""
    w = drawn(3, 48, 80, dtype=torch.bfloat16) if by_rows else drawn(48, 80, dtype=torch.bfloat16)
    found = quantise_weight(w, by_rows)
    turned = w.transpose(-1, -2)
    for x8, scale, want in ((found.rows, found.rows_scale, w), (found.columns, found.columns_scale, turned)):
        assert x8.is_contiguous()
        exact = fp8_oracle.as_fp8(want, fp8_oracle.E4M3, by_rows)
        assert relative(fp8.dequantise(x8, scale, torch.float64), exact) < 1e-7
    assert relative(fp8.dequantise(found.rows, found.rows_scale, torch.float64), w) > 0.01


def test_fp8_4_zeros_and_what_is_not_finite() -> None:
    """Zeros stay zeros, also as rows among others; infinity and NaN end as NaN, so that a step is refused."""
    x = torch.zeros(3, 16, dtype=torch.bfloat16)
    x[1] = 2.0**-130
    for by_rows in (False, True):
        x8, scale = fp8.quantise(x, fp8.E4M3, by_rows)
        assert bool(torch.isfinite(fp8.dequantise(x8, scale, torch.float32)).all())
        assert not fp8.dequantise(x8, scale, torch.float32)[0].any()
        for bad in (float("inf"), float("nan")):
            y8, scale = fp8.quantise(torch.full((2, 16), bad), fp8.E5M2, by_rows)
            assert bool(fp8.dequantise(y8, scale, torch.float32).isnan().all())


@pytest.mark.parametrize("by_rows", [False, True])
def test_op_f_no_tokens_keep_the_graph(by_rows: bool) -> None:
    w = drawn(32, 48, dtype=torch.bfloat16)
    x, dy = torch.zeros(0, 48, dtype=torch.bfloat16), torch.zeros(0, 32, dtype=torch.bfloat16)
    y, dx, dw = results(lambda x, w: linear_fp8.linear_fp8(x, w, quantise_weight(w, by_rows)), [x, w], dy)
    assert (y.shape, dx.shape) == ((0, 32), (0, 48))
    assert not dw.any()


@pytest.mark.parametrize("counts", [[5, 0, 12], [0, 17, 0], [2, 1, 9], [0, 0, 0]])
def test_fp8_4_experts(counts: list[int]) -> None:
    """Empty experts, one that has all rows, rows past the last offset, none at all."""
    dtype = torch.bfloat16
    x, w, dy = drawn(17, 48, dtype=dtype), drawn(3, 32, 48, dtype=dtype), drawn(17, 32, dtype=dtype, seed=1)
    offs = torch.tensor(counts).cumsum(0).int()

    def product(x: Tensor, w: Tensor) -> Tensor:
        return grouped_mm_fp8.grouped_mm_fp8(x, w, quantise_weight(w, by_rows=True), offs)

    same(results(product, [x, w], dy), fp8_oracle.grouped(x, w, counts, dy), dtype)


def test_eng_15_a_weight_gradient_can_wait() -> None:
    """What a later product adds is bitwise what autograd would have got."""
    dtype = torch.bfloat16
    kept: list[Any] = []

    def later(weight: Tensor, product: Callable[[], Tensor]) -> bool:
        kept.append(product)
        return True

    x, w, dy = drawn(37, 48, dtype=dtype), drawn(32, 48, dtype=dtype), drawn(37, 32, dtype=dtype, seed=1)
    for by_rows in (False, True):
        quantised = quantise_weight(w, by_rows)
        at_once = results(lambda x, w, q=quantised: linear_fp8.linear_fp8(x, w, q), [x, w], dy)
        leaf = w.clone().requires_grad_()
        linear_fp8.linear_fp8(x.clone().requires_grad_(), leaf, quantised, later=later).backward(dy)
        assert leaf.grad is None
        with torch.no_grad():
            assert torch.equal(kept.pop()(), at_once[2])
    stack, rows, offs = w[None].clone().requires_grad_(), dy @ w, torch.tensor([37], dtype=torch.int32)
    lent = quantise_weight(w[None], by_rows=True)
    grouped_mm_fp8.grouped_mm_fp8(rows.requires_grad_(), stack, lent, offs, later=later).backward(dy)
    assert stack.grad is None
    with torch.no_grad():
        assert torch.equal(kept.pop()()[0], dy.T @ rows)
