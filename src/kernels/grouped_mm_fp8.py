"""The grouped product of OP-1 in 8 bits, one scale a row (FP8-1, FP8-4); its weights come quantised.

The weight's gradient stays in the dtype of the rows: in 8 bits it wants a scale of each column within each
expert's rows, a pass over all rows whose cost exceeds what the product saves at the experts' sizes (FP8-3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from src.kernels.declaration import EAGER, Implementation
from src.kernels.dtypes import accumulate
from src.kernels.fp8 import E4M3, Quantised, dequantise, quantise
from src.kernels.grouped_mm import library_outer, loop_outer, loop_rows
from src.kernels.later import Later
from src.kernels.linear_fp8 import multiples
from src.kernels.opaque import opaque
from src.kernels.tail import zero_tail

Product = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, torch.dtype, bool], Tensor]
"""(x8 [N,D], w8 [E,M,D], their scales [N] and [E,M], offs, dtype, whether sums may lose bits) → [N,M]."""


def reference_rows(
    x_ND: Tensor, w_EMD: Tensor, x_scale_N: Tensor, w_scale_EM: Tensor, offs_E: Tensor,
    dtype: torch.dtype, fast: bool,
) -> Tensor:  # fmt: skip
    """y[a:b] = x[a:b]·w[e]ᵀ of what the numbers stand for, summed in fp32 at least."""
    wide = accumulate(dtype)
    return loop_rows(dequantise(x_ND, x_scale_N, wide), dequantise(w_EMD, w_scale_EM, wide), offs_E).to(dtype)


def scaled_rows(
    x_ND: Tensor, w_EMD: Tensor, x_scale_N: Tensor, w_scale_EM: Tensor, offs_E: Tensor,
    dtype: torch.dtype, fast: bool,
) -> Tensor:  # fmt: skip
    """`reference_rows` by torch's product for Hopper; rows past the last offset are zero."""
    if not x_ND.shape[0]:
        return x_ND.new_zeros(0, w_EMD.shape[1], dtype=dtype)
    by_rows = F.ScalingType.RowWise
    y_NM: Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]
        x_ND, w_EMD.transpose(1, 2), x_scale_N, by_rows, w_scale_EM, by_rows,
        offs=offs_E, output_dtype=dtype, use_fast_accum=fast,
    )  # fmt: skip
    zero_tail(y_NM, offs_E)
    return y_NM


def _rows_shape(
    x_ND: Tensor, w_EMD: Tensor, x_scale_N: Tensor, w_scale_EM: Tensor, offs_E: Tensor,
    dtype: torch.dtype, fast: bool,
) -> Tensor:  # fmt: skip
    return x_ND.new_empty(x_ND.shape[0], w_EMD.shape[1], dtype=dtype)


def _outer_shape(y_NM: Tensor, x_ND: Tensor, offs_E: Tensor) -> Tensor:
    return x_ND.new_empty(offs_E.shape[0], y_NM.shape[1], x_ND.shape[1])


def _differentiable(
    name: str, rows: Product, outer: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Callable[..., Tensor]:
    """`(x_ND, w_EMD, quantised, offs_E int32 ends, later) -> y_NM`."""
    rows = opaque(
        f"{name}_rows",
        "(Tensor x, Tensor w, Tensor x_scale, Tensor w_scale, Tensor offs, ScalarType dtype, bool fast) "
        "-> Tensor",
        rows,
        _rows_shape,
    )
    outer = opaque(f"{name}_outer", "(Tensor a, Tensor b, Tensor offs) -> Tensor", outer, _outer_shape)

    class GroupedMmFp8(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, x_ND: Tensor, w_EMD: Tensor, offs_E: Tensor, later: Later | None, *quantised: Tensor
        ) -> Tensor:
            w8_EMD, w8_EDM, scale_EM, scale_ED = quantised
            ctx.save_for_backward(x_ND, w_EMD, offs_E, w8_EDM, scale_ED)
            ctx.later = later
            x8_ND, scale_N = quantise(x_ND, E4M3, by_rows=True)
            return rows(x8_ND, w8_EMD, scale_N, scale_EM, offs_E, x_ND.dtype, True)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            x_ND, w_EMD, offs_E, w8_EDM, scale_ED = ctx.saved_tensors
            dy_NM = grads[0].contiguous()  # A gradient of stride 0 raises in the library.
            dw_EMD = None
            if ctx.later is None or not ctx.later(w_EMD, lambda: outer(dy_NM, x_ND, offs_E)):
                dw_EMD = outer(dy_NM, x_ND, offs_E)
            dy8_NM, scale_N = quantise(dy_NM, E4M3, by_rows=True)
            dx_ND = rows(dy8_NM, w8_EDM, scale_N, scale_ED, offs_E, dy_NM.dtype, False)
            return dx_ND, dw_EMD, None, None, None, None, None, None

    def grouped_mm_fp8(
        x_ND: Tensor, w_EMD: Tensor, quantised: Quantised, offs_E: Tensor, later: Later | None = None
    ) -> Tensor:
        out: Tensor = GroupedMmFp8.apply(x_ND, w_EMD, offs_E, later, *quantised)  # type: ignore[no-untyped-call]
        return out

    return grouped_mm_fp8


grouped_mm_fp8 = _differentiable("grouped_mm_fp8_loop", reference_rows, loop_outer)
scaled_grouped_mm = _differentiable("grouped_mm_fp8_scaled", scaled_rows, library_outer)

IMPLEMENTATIONS = (
    Implementation("grouped_mm_fp8", EAGER, grouped_mm_fp8, deterministic=(True, True), saves="x"),
    Implementation(
        "grouped_mm_fp8",
        "scaled_grouped_mm",
        scaled_grouped_mm,
        source="library",
        deterministic=(True, True),
        saves="x",
        devices=frozenset({"cuda"}),
        archs=frozenset({"sm90"}),
        dtypes=frozenset({torch.bfloat16}),
        shapes=multiples,
    ),
)
