"""Accumulation dtype: at least fp32, never cast down, so that fp64 stays fp64 (T-2)."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulate(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for everything narrower."""
    return torch.promote_types(dtype, torch.float32)


def widen(x: Tensor) -> Tensor:
    """`x` in its accumulation dtype; `x` itself where it is that already."""
    return x.to(accumulate(x.dtype))


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in that dtype, and untouched where it has it.

    What a cast hands on as it is has no gradient where torch 2.11 compiles a rule of autograd that returns
    it (quirk `traced_cast`).
    """
    return x if x.dtype == dtype else x.to(dtype)
