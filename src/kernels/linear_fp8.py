"""The product of a projection in 8 bits (FP8-1); its weight comes quantised, its input is quantised here.

With one scale a tensor all three products are in 8 bits: forward e4m3·e4m3, the gradients e5m2·e4m3. With
one scale a row the weight's gradient stays in the dtype of the input: its sum runs over tokens, whose maxima
would hang on which tokens a rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from src.kernels.declaration import EAGER, Implementation
from src.kernels.dtypes import accumulate
from src.kernels.fp8 import E4M3, E5M2, FP8_ARCHS, MULTIPLE, Quantised, dequantise, quantise
from src.kernels.later import Later
from src.kernels.linear import linear
from src.kernels.opaque import opaque

Product = Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype, bool], Tensor]
"""(a [M,K], b [N,K], their scales, dtype, whether partial sums may lose bits) → a·bᵀ [M,N]."""


def reference_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """a·bᵀ of what the numbers of 8 bits stand for, summed in fp32 at least."""
    wide = accumulate(dtype)
    return (dequantise(a, scale_a, wide) @ dequantise(b, scale_b, wide).T).to(dtype)


def scaled_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """`reference_product` by cuBLAS or CUTLASS; on Hopper `fast` sums keep about 14 bits between tiles."""
    if scale_a.dim():
        scale_a, scale_b = scale_a[:, None], scale_b[None]
    return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast)


def _product_shape(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


_scaled_mm = opaque(
    "scaled_mm",
    "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType dtype, bool fast) -> Tensor",
    scaled_product,
    _product_shape,
)


def _differentiable(product: Product) -> Callable[..., Tensor]:
    """`(x, weight, quantised, bias, later) -> y`, whose gradient of the weight passes the rounding by."""

    class LinearFp8(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, x_TD: Tensor, weight: Tensor, later: Later | None, *quantised: Tensor
        ) -> Tensor:
            rows, columns, rows_scale, columns_scale = quantised
            by_rows = rows_scale.dim() > 0
            x8_TD, scale = quantise(x_TD, E4M3, by_rows)
            ctx.save_for_backward(x_TD if by_rows else x8_TD, scale, weight, columns, columns_scale)
            ctx.later, ctx.by_rows = later, by_rows
            return product(x8_TD, rows, scale, rows_scale, x_TD.dtype, True)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            x_TD, x_scale, weight, columns, columns_scale = ctx.saved_tensors
            dy_TM = grads[0]
            dtype = dy_TM.dtype
            dy8_TM, dy_scale = quantise(dy_TM, E4M3 if ctx.by_rows else E5M2, ctx.by_rows)

            def of_weight() -> Tensor:
                if ctx.by_rows:
                    dw: Tensor = dy_TM.T @ x_TD
                    return dw
                a, b = dy8_TM.t().contiguous(), x_TD.t().contiguous()
                return product(a, b, dy_scale, x_scale, dtype, False)

            dw = None if ctx.later is not None and ctx.later(weight, of_weight) else of_weight()
            dx_TD = product(dy8_TM, columns, dy_scale, columns_scale, dtype, False)
            return dx_TD, dw, None, None, None, None, None

    def linear_fp8(
        x: Tensor,
        weight: Tensor,
        quantised: Quantised,
        bias: Tensor | None = None,
        later: Later | None = None,
    ) -> Tensor:
        if not x.numel():
            return linear(x, weight, bias, later)
        x_TD = x.flatten(0, -2)
        missing = -x_TD.shape[0] % MULTIPLE
        if missing:  # The weight's gradient sums over rows.
            x_TD = F.pad(x_TD, (0, 0, 0, missing))
        y_TM: Tensor = LinearFp8.apply(x_TD, weight, later, *quantised)  # type: ignore[no-untyped-call]
        y = y_TM[: x_TD.shape[0] - missing].view(*x.shape[:-1], -1)
        return y if bias is None else y + bias

    return linear_fp8


def multiples(widths: Mapping[str, int], dtype: torch.dtype) -> str | None:
    """What the library's products in 8 bits want of the widths."""
    bad = [f"{name} {width}" for name, width in widths.items() if width % MULTIPLE]
    return f"needs widths of a multiple of {MULTIPLE}, which {', '.join(bad)} are not" if bad else None


linear_fp8 = _differentiable(reference_product)
linear_fp8.__doc__ = """x·Wᵀ + b for x [..., in], weight [out, in], bias [out], as [..., out].

`quantised` is the weight as `quantise_weight` gives it, whose scales say which recipe holds; `weight`
itself is not read and gets the gradient, which `later` may take over. Rows of no tokens keep the graph.
"""
scaled_mm = _differentiable(_scaled_mm)

IMPLEMENTATIONS = (
    Implementation(
        "linear_fp8", EAGER, linear_fp8, deterministic=(True, True), saves="x in 8 bits, or x by rows"
    ),
    Implementation(
        "linear_fp8",
        "scaled_mm",
        scaled_mm,
        source="library",
        deterministic=(True, True),
        saves="x in 8 bits, or x by rows",
        devices=frozenset({"cuda"}),
        archs=FP8_ARCHS,
        dtypes=frozenset({torch.bfloat16}),
        shapes=multiples,
    ),
)
