"""Triton kernels of OP-12: a bias on the rows of its expert, and its gradient, a sum over these rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expert_bias_kernel(
    rows_ptr, bias_ptr, offs_ptr, out_ptr, M, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row and one block of columns a program; a row past the last offset is not read and becomes zero."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, BLOCK_E)
    ends = tl.load(offs_ptr + e, mask=e < E, other=0)
    expert = tl.sum(((ends <= row) & (e < E)).to(tl.int32), 0)
    inside = (at < M) & (expert < E)
    x = tl.load(rows_ptr + row * M + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias_ptr + expert.to(tl.int64) * M + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * M + at, x.to(out_ptr.dtype.element_ty), mask=at < M)


@triton.jit
def expert_bias_parts_kernel(
    dout_ptr, offs_ptr, drows_ptr, parts_ptr, rows, M,
    E: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of rows, zero past the last offset, and its sum for each expert in the tile.

    Experts and tiles both ascend, so that place tile + expert of `parts` has one writer.
    """
    tile = tl.program_id(0).to(tl.int64)
    row, at = tile * ROWS + tl.arange(0, ROWS)[:, None], tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    last = tl.minimum(tl.load(offs_ptr + E - 1).to(tl.int64), rows)
    inside, place = at[None] < M, row * M + at[None]
    dout = tl.load(dout_ptr + place, mask=inside & (row < last), other=0.0)
    tl.store(drows_ptr + place, dout.to(drows_ptr.dtype.element_ty), mask=inside & (row < rows))
    wide = dout.to(tl.float32)
    e = tl.arange(0, BLOCK_E)
    ends = tl.load(offs_ptr + e, mask=e < E, other=0)
    first = tl.sum(((ends <= tile * ROWS) & (e < E)).to(tl.int32), 0)
    stop = tl.sum(((ends < tl.minimum(tile * ROWS + ROWS, last)) & (e < E)).to(tl.int32), 0) + 1
    for expert in range(first, tl.minimum(stop, E)):
        begin = tl.load(offs_ptr + expert - 1, mask=expert > 0, other=0)
        end = tl.load(offs_ptr + expert)
        part = tl.sum(tl.where((row >= begin) & (row < end), wide, 0.0), 0)
        tl.store(parts_ptr + (tile + expert) * M + at, part, mask=at < M)


@triton.jit
def expert_bias_sum_kernel(
    parts_ptr, offs_ptr, dbias_ptr, M, ROWS: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One expert and one block of columns: the parts of its tiles in ascending order, zero without rows."""
    expert = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(offs_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offs_ptr + expert)
    first, stop = begin // ROWS, (end + ROWS - 1) // ROWS
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, tl.where(end > begin, stop, first), TILES):
        tile = (start + tl.arange(0, TILES))[:, None]
        place = (tile + expert).to(tl.int64) * M + at[None]
        total += tl.sum(tl.load(parts_ptr + place, mask=(tile < stop) & (at[None] < M), other=0.0), 0)
    out = total.to(dbias_ptr.dtype.element_ty)
    tl.store(dbias_ptr + expert.to(tl.int64) * M + at, out, mask=at < M)
