"""An fp32 number in two halves: the bf16 number that computes, and 16 bits that its rounding lost (OP-4)."""

from __future__ import annotations

import torch
from torch import Tensor

NAN = 0x7FC00000
"""The one NaN that is kept: with a carry out of a full mantissa others would come to a zero as bf16."""


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 and int16 halves of an fp32 tensor, of which `join` makes the same bits again.

    The high half is (bits + 0x8000) >> 16, the nearest bf16, a tie away from zero (idea: Apex,
    DistributedFusedAdam). `x.bfloat16()` differs at ties alone, which it takes to the even neighbour. Numbers
    beyond the largest bf16 become infinite in both, and are finite again when joined.
    """
    bits = torch.where(x.isnan(), NAN, x.view(torch.int32))
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def keep(x: Tensor, high: Tensor, low: Tensor) -> None:
    """Write the halves of `x` to `high` and `low`."""
    for half, new in zip((high, low), split(x), strict=True):
        half.copy_(new)


def join(high: Tensor, low: Tensor) -> Tensor:
    """The fp32 tensor of two halves; the low one's first bit tells whether the high one was rounded up."""
    lost = low.to(torch.int32) & 0xFFFF
    bits = ((high.view(torch.int16).to(torch.int32) - (lost >> 15)) << 16) | lost
    return bits.view(torch.float32)
