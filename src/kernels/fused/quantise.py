"""Triton kernel of the quantisation of weights: both forms in one pass over what is read and written."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantise_kernel(
    w_ptr, rows_ptr, columns_ptr, rows_scale_ptr, columns_scale_ptr, M, D,
    BY_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One tile of one matrix [M,D] a program: w/scale in 8 bits as [M,D], and turned as [D,M].

    The tile is turned by its addresses: a turned tile of 8 bits holds wrong numbers in triton 3.7.1.
    """
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    matrix = tl.program_id(2).to(tl.int64)
    inside = (m < M)[:, None] & (d < D)[None, :]
    at = matrix * M * D + m.to(tl.int64)[:, None] * D + d[None, :]
    turned = matrix * M * D + d.to(tl.int64)[None, :] * M + m[:, None]
    w = tl.load(w_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if BY_ROWS:
        scale = tl.load(rows_scale_ptr + matrix * M + m, mask=m < M, other=1.0)[:, None]
        turned_scale = tl.load(columns_scale_ptr + matrix * D + d, mask=d < D, other=1.0)[None, :]
    else:
        scale = tl.load(rows_scale_ptr)
        turned_scale = tl.load(columns_scale_ptr)
    tl.store(rows_ptr + at, tl.div_rn(w, scale).to(rows_ptr.dtype.element_ty), mask=inside)
    tl.store(columns_ptr + turned, tl.div_rn(w, turned_scale).to(rows_ptr.dtype.element_ty), mask=inside)
