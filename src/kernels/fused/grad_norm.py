"""Triton kernels that sum squares over a table of tensors: chunk by chunk, then over the chunks (OP-4)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grad_norm_chunks_kernel(
    table_ptr, like_ptr, sums_ptr, TENSORS: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor; the last whose first chunk is not beyond it, of the dtype of `like`."""
    chunk = tl.program_id(0)
    firsts = tl.load(table_ptr + tl.arange(0, TENSORS))
    index = tl.sum((firsts <= chunk).to(tl.int32), 0) - 1
    address = tl.load(table_ptr + TENSORS + index)
    n = tl.load(table_ptr + 2 * TENSORS + index)
    x_ptr = address.to(like_ptr.dtype)
    if ALIGNED:
        x_ptr = tl.multiple_of(x_ptr, 16)
        n = tl.multiple_of(n, 16)
    begin = (chunk - tl.load(table_ptr + index)) * CHUNK
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, CHUNK, BLOCK):
        at = begin + start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
        total += x * x
    tl.store(sums_ptr + chunk, tl.sum(total, 0))


@triton.jit
def grad_norm_total_kernel(sums_ptr, out_ptr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of `COUNT` numbers, by one program."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, COUNT, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(sums_ptr + at, mask=at < COUNT, other=0.0)
    tl.store(out_ptr, tl.sum(total, 0))
