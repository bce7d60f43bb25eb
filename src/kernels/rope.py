"""Rotary position embedding (OP-11)."""

from __future__ import annotations

import torch
from torch import Tensor

from src.kernels.declaration import EAGER, Implementation
from src.kernels.dtypes import widen


def rope(x_BSHR: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> Tensor:
    """Rotate the pairs (x0,x1), (x2,x3), … by their angles; the order of dimensions stays (ATT-2).

    `cos_BSR` and `sin_BSR` are fp32 at least and hold one column per pair, so R/2. The dtype of `x` is kept.
    RoFormer (arXiv 2104.09864, eq. 34) in the layout of DeepSeek's weights, as a product of complex numbers:
    on CPU a third of the time of the same in real numbers, forward and backward.
    """
    pairs_BSHR2 = widen(x_BSHR).reshape(*x_BSHR.shape[:-1], -1, 2)
    if any(stride % 2 for stride in pairs_BSHR2.stride()[:-1]):  # Complex numbers lie on even addresses.
        pairs_BSHR2 = pairs_BSHR2.contiguous()
    turned = torch.view_as_complex(pairs_BSHR2) * torch.complex(cos_BSR, sin_BSR)[:, :, None]
    return torch.view_as_real(turned).flatten(-2).to(x_BSHR.dtype)


def real_rope(x_BSHR: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> Tensor:
    """`rope` in real numbers: Inductor fuses these and has no complex ones."""
    even_BSHR, odd_BSHR = widen(x_BSHR).reshape(*x_BSHR.shape[:-1], -1, 2).unbind(-1)
    cos_BS1R, sin_BS1R = cos_BSR[:, :, None], sin_BSR[:, :, None]
    turned = (even_BSHR * cos_BS1R - odd_BSHR * sin_BS1R, even_BSHR * sin_BS1R + odd_BSHR * cos_BS1R)
    return torch.stack(turned, -1).flatten(-2).to(x_BSHR.dtype)


IMPLEMENTATIONS = (
    Implementation("rope", EAGER, rope, deterministic=(True, True), saves="x, cos, sin"),
    Implementation("rope", "real", real_rope, deterministic=(True, True), saves="cos, sin"),
)
