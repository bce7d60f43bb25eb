"""Triton kernels of OP-6: a token to its K rows, K rows to their token; each row is touched once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def spread_kernel(x_ptr, slot_row_ptr, out_ptr, rows, D, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Copy one block of columns of a token to those of its K rows that there are."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * D + at, mask=at < D, other=0.0)
    for k in tl.static_range(TOP_K):
        row = tl.load(slot_row_ptr + token * TOP_K + k).to(tl.int64)
        tl.store(out_ptr + row * D + at, x, mask=(at < D) & (row < rows))


@triton.jit
def gather_sum_kernel(
    rows_ptr, slot_row_ptr, weights_ptr, residual_ptr, out_ptr, rows, D, TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr, ONTO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token and one block of columns a program; see `rows.gather_sum`."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < D
    if ONTO:
        total = tl.load(residual_ptr + token * D + at, mask=inside, other=0.0).to(tl.float32)
    else:
        total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(slot_row_ptr + token * TOP_K + k).to(tl.int64)
        x = tl.load(rows_ptr + row * D + at, mask=inside & (row < rows), other=0.0).to(tl.float32)
        if WEIGHTED:
            x = x * tl.load(weights_ptr + token * TOP_K + k).to(tl.float32)
        total += x
    tl.store(out_ptr + token * D + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def weighted_spread_kernel(
    dout_ptr, rows_ptr, slot_row_ptr, weights_ptr, drows_ptr, dweights_ptr,
    D: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of a weighted `gather_sum_kernel` for one token: w_k·dout and ⟨dout, row_k⟩."""
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    slot, there = token * TOP_K + k, k < TOP_K
    row = tl.load(slot_row_ptr + slot, mask=there, other=0).to(tl.int64)
    weight = tl.load(weights_ptr + slot, mask=there, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, D, BLOCK):
        at = start + tl.arange(0, BLOCK)
        place, inside = row[:, None] * D + at[None], there[:, None] & (at < D)[None]
        dout = tl.load(dout_ptr + token * D + at, mask=at < D, other=0.0).to(tl.float32)[None]
        dweight += tl.sum(tl.load(rows_ptr + place, mask=inside, other=0.0).to(tl.float32) * dout, 1)
        tl.store(drows_ptr + place, (dout * weight[:, None]).to(drows_ptr.dtype.element_ty), mask=inside)
    tl.store(dweights_ptr + slot, dweight.to(dweights_ptr.dtype.element_ty), mask=there)
