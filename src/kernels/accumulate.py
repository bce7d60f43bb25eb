"""The gradient of a micro-batch onto the sum of those before, in the sum's wider dtype (ENG-15)."""

from __future__ import annotations

import torch
from torch import Tensor

from src.kernels.declaration import EAGER, Implementation

BLOCK = 4096
"""Elements of a program."""


def accumulate(total: Tensor | None, part: Tensor, dtype: torch.dtype) -> Tensor:
    """`total` with `part` added in place; without a total a copy of `part` in `dtype`."""
    return part.to(dtype) if total is None else total.add_(part)


def triton_accumulate(total: Tensor | None, part: Tensor, dtype: torch.dtype) -> Tensor:
    """`accumulate` at the rate of memory; torch's loop over two dtypes took three times as long (LOG.md)."""
    from src.kernels.fused.accumulate import accumulate_kernel

    part = part.contiguous()
    is_first = total is None
    out = torch.empty_like(part, dtype=dtype) if total is None else total
    assert out.is_contiguous()
    assert out.dtype == dtype
    if part.numel():
        programs = (part.numel() + BLOCK - 1) // BLOCK
        accumulate_kernel[(programs,)](out, part, part.numel(), FIRST=is_first, BLOCK=BLOCK, num_warps=8)
    return out


IMPLEMENTATIONS = (
    Implementation("accumulate", EAGER, accumulate, deterministic=(True, True), saves="nothing"),
    Implementation(
        "accumulate",
        "triton",
        triton_accumulate,
        source="triton",
        deterministic=(True, True),
        saves="nothing",
        devices=frozenset({"cuda", "rocm"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    ),
)
