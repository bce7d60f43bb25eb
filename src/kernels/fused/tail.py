"""Triton kernel that zeroes the rows past the last offset of a grouped product; no host sees the offset."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tail_kernel(
    y_ptr, offs_ptr, experts, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Zero rows `offs[-1]` and on of y [rows, WIDTH]; a program has `ROWS` rows and mostly nothing to do."""
    end = tl.load(offs_ptr + experts - 1)
    first = tl.program_id(0) * ROWS
    if first + ROWS > end:
        for row in range(ROWS):
            here = first + row
            if (here >= end) & (here < rows):
                for start in range(0, WIDTH, BLOCK):
                    at = start + tl.arange(0, BLOCK)
                    tl.store(y_ptr + here.to(tl.int64) * WIDTH + at, 0.0, mask=at < WIDTH)
