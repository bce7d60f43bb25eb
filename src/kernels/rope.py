"""Rotary position embedding (OP-11)."""

from __future__ import annotations

import torch
from torch import Tensor

from src.kernels.declaration import EAGER, Implementation


def rope(x_BSHR: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> Tensor:
    """Rotate the pairs (x0,x1), (x2,x3), … by their angles; the order of dimensions stays (ATT-2).

    `cos_BSR` and `sin_BSR` are fp32 at least and hold one column per pair, so R/2. The dtype of `x` is kept.
    RoFormer (arXiv 2104.09864, eq. 34), in the layout of DeepSeek's weights.
    """
    even, odd = x_BSHR.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_BSR[:, :, None], sin_BSR[:, :, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x_BSHR.dtype)


IMPLEMENTATIONS = (Implementation("rope", EAGER, rope, deterministic=(True, True), saves="x, cos, sin"),)
