"""Triton kernel that adds up the rows of each token."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather_sum_kernel(
    rows_ptr, slot_row_ptr, weights_ptr, residual_ptr, out_ptr, width,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token and one block of columns a program; see `gather_sum`."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    if WEIGHTED:
        total = tl.load(residual_ptr + token * width + at, mask=inside, other=0.0).to(tl.float32)
    else:
        total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(slot_row_ptr + token * TOP_K + k).to(tl.int64)
        x = tl.load(rows_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            x = x * tl.load(weights_ptr + token * TOP_K + k).to(tl.float32)
        total += x
    tl.store(out_ptr + token * width + at, total.to(out_ptr.dtype.element_ty), mask=inside)
