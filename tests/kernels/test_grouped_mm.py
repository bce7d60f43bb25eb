"""OP-1: both grouped products against dense products, and each duty of the wrapper."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from src.kernels.grouped_mm import Product, grouped_mm, torch_grouped_mm
from tests.models.tools import relative

BOTH = pytest.mark.parametrize("function", [grouped_mm, torch_grouped_mm], ids=["eager", "library"])
LOADS = {
    "uneven": [3, 11, 1, 6],
    "empty first": [0, 9, 0, 12],
    "empty last": [5, 16, 0, 0],
    "all to one": [0, 21, 0, 0],
    "one row": [0, 0, 1, 0],
    "no rows": [0, 0, 0, 0],
}
D, M = 12, 20


def offsets(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0, dtype=torch.int32)


def leaves(rows: int, experts: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, D, generator=generator).requires_grad_()
    return x, torch.randn(experts, M, D, generator=generator).requires_grad_()


def dense(x_ND: Tensor, w_EMD: Tensor, counts: list[int]) -> Tensor:
    """Every row times every expert, then the row's own picked by a one-hot sum; fp64."""
    expert_N = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    pick_NE = torch.nn.functional.one_hot(expert_N, len(counts)).double()
    return torch.einsum("nd,emd,ne->nm", x_ND.double(), w_EMD.double(), pick_NE)


@BOTH
@pytest.mark.parametrize("load", LOADS)
def test_values_and_gradients_equal_dense_products(function: Product, load: str) -> None:
    counts = LOADS[load]
    x, w = leaves(sum(counts), len(counts))
    y = function(x, w, offsets(counts))
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(4))
    grads = torch.autograd.grad((y * weight).sum(), (x, w))
    want = dense(x, w, counts)
    wants = torch.autograd.grad((want * weight).sum(), (x, w))
    for found, reference in zip((y, *grads), (want, *wants), strict=True):
        assert found.shape == reference.shape
        assert torch.allclose(found.double(), reference.double(), rtol=1e-5, atol=1e-5)
    empty = [e for e, count in enumerate(counts) if count == 0]
    assert not grads[1][empty].any()


@BOTH
def test_num_4_rows_past_the_last_offset_are_never_read(function: Product) -> None:
    counts = [2, 0, 5]
    x, w = leaves(10, 3)
    poisoned = x.detach().clone()
    poisoned[7:] = float("nan")
    poisoned.requires_grad_()
    y = function(poisoned, w, offsets(counts))
    assert not y[7:].any()
    upstream = torch.ones_like(y)
    upstream[7:] = float("nan")
    dx, dw = torch.autograd.grad(y, (poisoned, w), upstream)
    assert not dx[7:].any()
    x7 = x.detach()[:7].requires_grad_()
    want = torch.autograd.grad(dense(x7, w, counts).sum(), (x7, w))
    assert relative(dx[:7], want[0]) < 1e-6
    assert relative(dw, want[1]) < 1e-6


@BOTH
def test_a_gradient_of_stride_zero_is_taken(function: Product) -> None:
    x, w = leaves(7, 3)
    dx, _ = torch.autograd.grad(function(x, w, offsets([2, 0, 5])).sum(), (x, w))
    assert bool(dx.any())


@BOTH
def test_more_offsets_than_rows_are_refused(function: Product) -> None:
    x, w = leaves(7, 3)
    with pytest.raises(ValueError, match="last offset is 9 but there are 7 rows"):
        function(x, w, offsets([2, 0, 7]))


def test_library_facts_that_the_wrapper_stands_on() -> None:
    """When one of these stops raising, a line of the wrapper can go."""
    x, w = torch.randn(7, D), torch.randn(3, M, D).requires_grad_()
    library = torch.nn.functional.grouped_mm
    with pytest.raises(RuntimeError):
        library(x.double(), w.double().transpose(1, 2), offs=offsets([2, 0, 5]))
    with pytest.raises(RuntimeError):
        library(x, w.transpose(1, 2), offs=offsets([2, 0, 5])).sum().backward()


def test_cmp_1_custom_operations_pass_opcheck() -> None:
    x, w = (leaf.detach() for leaf in leaves(7, 3))
    y = torch.randn(7, M)
    for kind in ("loop", "library"):
        operations = torch.ops.manyhead
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(
            getattr(operations, f"grouped_mm_{kind}_rows"), (x, w, offsets([2, 0, 5])), test_utils=tests
        )
        torch.library.opcheck(
            getattr(operations, f"grouped_mm_{kind}_outer"), (y, x, offsets([2, 0, 5])), test_utils=tests
        )
