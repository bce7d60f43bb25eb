"""FP8-5: the products of 8 bits that only a GPU has, against fp64 arithmetic, value and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from src.kernels.grouped_mm_fp8 import scaled_grouped_mm
from src.kernels.linear_fp8 import scaled_mm
from src.kernels.quantise_weight import quantise_weight, triton_quantise_weight
from tests.kernels import fp8_oracle
from tests.models.tools import relative

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="older than Hopper"
    ),
]
BOUND = 1e-2
FAST = 3e-2
"""Of forwards. Hopper's fast sums keep 14 bits, those of the largest product or sum so far: fp64 arithmetic
cut off there gives 2.5e-2 for the row with an outlier alone and 9e-3 for many rows, 6e-3 and 2e-3 with what
the gradients use, sums that go to fp32 after every 128 products."""


def drawn(*shape: int, std: float = 1.0, seed: int = 0) -> Tensor:
    """bf16, with single numbers that are fifty times as large as the others."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(std)
    x.view(-1)[::997] *= 50
    return x.to("cuda", torch.bfloat16)


def results(function: Callable[..., Any], inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def same(found: list[Tensor], want: list[Tensor]) -> None:
    for index, (ours, theirs) in enumerate(zip(found, want, strict=True)):
        assert ours.dtype == torch.bfloat16, index
        assert relative(ours, theirs) < (BOUND if index else FAST), (index, relative(ours, theirs))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rows", [512, 333, 1])
@pytest.mark.parametrize("by_rows", [False, True])
def test_fp8_1_projection(by_rows: bool, rows: int, compiled: bool) -> None:
    x, w, b, dy = drawn(rows, 576), drawn(208, 576, std=0.05), drawn(208), drawn(rows, 208, std=1e-6, seed=1)
    quantised = quantise_weight(w, by_rows)
    function: Any = lambda x, w, b: scaled_mm(x, w, quantised, b)  # noqa: E731
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, dynamic=False)
    found = results(function, [x, w, b], dy)
    same(found, fp8_oracle.linear(x, w, b, dy, by_rows))
    for _ in range(2):  # DET-3
        assert all(map(torch.equal, found, results(function, [x, w, b], dy)))


@pytest.mark.parametrize("by_rows", [False, True])
def test_fp8_1_layouts_that_layers_hand_over(by_rows: bool) -> None:
    """Samples of positions, a slice of wider rows, gradients that are turned or of stride 0."""
    wide, w = drawn(3, 40, 96), drawn(64, 48, std=0.1)
    quantised = quantise_weight(w, by_rows)
    turned = drawn(64, 40, 3, std=1e-3, seed=1).permute(2, 1, 0)
    for dy in (turned, torch.ones((), device="cuda", dtype=torch.bfloat16).expand(3, 40, 64)):
        leaf, weight = wide.detach().clone().requires_grad_(), w.clone().requires_grad_()
        y = scaled_mm(leaf[..., 48:], weight, quantised)
        y.backward(dy)
        want = fp8_oracle.linear(
            wide[..., 48:].reshape(120, 48), w, y.new_zeros(64), dy.reshape(120, 64), by_rows
        )
        assert leaf.grad is not None
        assert weight.grad is not None
        same([y.reshape(120, 64), leaf.grad[..., 48:].reshape(120, 48), weight.grad], want[:3])
        assert not leaf.grad[..., :48].any()


@pytest.mark.parametrize("by_rows", [False, True])
def test_fp8_1_no_tokens(by_rows: bool) -> None:
    w = drawn(64, 48).requires_grad_()
    x = torch.zeros(0, 48, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    scaled_mm(x, w, quantise_weight(w.detach(), by_rows)).sum().backward()
    assert w.grad is not None
    assert not w.grad.any()
    assert x.grad is not None


LOADS = {"uneven": [1, 300, 7, 0, 204], "all to one": [0, 0, 512, 0, 0], "tail": [1, 100, 7, 0, 300]}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("load", LOADS)
def test_fp8_4_experts(load: str, compiled: bool) -> None:
    """NUM-4 too: what lies in rows past the last offset reaches nothing."""
    counts = LOADS[load]
    offs = torch.tensor(counts, device="cuda").cumsum(0).int()
    x, w, dy = drawn(512, 64), drawn(5, 48, 64, std=0.1), drawn(512, 48, std=1e-6, seed=1)
    want = fp8_oracle.grouped(x, w, counts, dy)
    x[sum(counts) :] = float("nan")
    quantised = quantise_weight(w, by_rows=True)
    function: Any = lambda x, w: scaled_grouped_mm(x, w, quantised, offs)  # noqa: E731
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, dynamic=False)
    found = results(function, [x, w], dy)
    same(found, want)
    for _ in range(2):
        assert all(map(torch.equal, found, results(function, [x, w], dy)))


def test_fp8_4_experts_without_rows() -> None:
    w = drawn(3, 48, 64).requires_grad_()
    x = torch.zeros(0, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    offs = torch.zeros(3, device="cuda", dtype=torch.int32)
    scaled_grouped_mm(x, w, quantise_weight(w.detach(), by_rows=True), offs).sum().backward()
    assert w.grad is not None
    assert not w.grad.any()


def test_op_d_nothing_waits_for_the_device() -> None:
    x, w, dy = drawn(512, 64), drawn(48, 64), drawn(512, 48, seed=1)
    experts, offs = drawn(2, 48, 64), torch.tensor([200, 512], device="cuda", dtype=torch.int32)

    def once() -> None:
        for by_rows in (False, True):
            quantised = quantise_weight(w, by_rows)
            results(lambda x, w, q=quantised: scaled_mm(x, w, q), [x, w], dy)
        results(
            lambda x, w: scaled_grouped_mm(x, w, quantise_weight(w, by_rows=True), offs), [x, experts], dy
        )

    once()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        once()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("shape", [(208, 576), (70, 33), (3, 48, 80)])
def test_fp8_4_the_kernel_rounds_weights_as_torch_does(shape: tuple[int, ...], by_rows: bool) -> None:
    """Both forms and their scales bit by bit, in new memory and in old."""
    w = drawn(*shape, std=0.05)
    want, found = quantise_weight(w, by_rows), triton_quantise_weight(w, by_rows)
    old = triton_quantise_weight(torch.zeros_like(w), by_rows)
    again = triton_quantise_weight(w, by_rows, old)
    for index, (ours, theirs) in enumerate(zip(found, want, strict=True)):
        assert torch.equal(ours.float(), theirs.float()), index
        assert torch.equal(again[index].float(), theirs.float()), index
        assert again[index] is old[index]
        assert ours.is_contiguous()
