"""Triton kernel that adds one gradient to another of a wider dtype."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def accumulate_kernel(total_ptr, part_ptr, n, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """total += part, or total = part for the FIRST."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(part_ptr + at, mask=inside, other=0.0).to(total_ptr.dtype.element_ty)
    if not FIRST:
        x += tl.load(total_ptr + at, mask=inside, other=0.0)
    tl.store(total_ptr + at, x, mask=inside)
