"""Rotary position embedding (OP-11)."""

from __future__ import annotations

import torch
from torch import Tensor

from src.kernels.declaration import EAGER, Implementation
from src.kernels.dtypes import widen


def rope(x_BSHR: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate pairs of dimensions by their angles; the order of dimensions stays (ATT-2).

    Pairs are (x0,x1), (x2,x3), … if `interleaved`, as in DeepSeek's weights; else they lie a half apart,
    (x0,x[R/2]), (x1,x[R/2+1]), …, as in all others. `cos_BSR` and `sin_BSR` are fp32 at least and hold one
    column per pair, so R/2. The dtype of `x` is kept. RoFormer (arXiv 2104.09864, eq. 34).
    """
    if not interleaved:
        return real_rope(x_BSHR, cos_BSR, sin_BSR, interleaved=False)
    # As complex numbers, neighbours take a third of the time on CPU, forward and backward.
    pairs_BSHR2 = widen(x_BSHR).reshape(*x_BSHR.shape[:-1], cos_BSR.shape[-1], 2)
    if any(stride % 2 for stride in pairs_BSHR2.stride()[:-1]):  # Complex numbers lie on even addresses.
        pairs_BSHR2 = pairs_BSHR2.contiguous()
    turned = torch.view_as_complex(pairs_BSHR2) * torch.complex(cos_BSR, sin_BSR)[:, :, None]
    return torch.view_as_real(turned).flatten(-2).to(x_BSHR.dtype)


def real_rope(x_BSHR: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, *, interleaved: bool) -> Tensor:
    """`rope` in real numbers: Inductor fuses these and has no complex ones."""
    pairs = cos_BSR.shape[-1]
    sizes, part = ((pairs, 2), -1) if interleaved else ((2, pairs), -2)
    a_BSHR, b_BSHR = widen(x_BSHR).reshape(*x_BSHR.shape[:-1], *sizes).unbind(part)
    cos_BS1R, sin_BS1R = cos_BSR[:, :, None], sin_BSR[:, :, None]
    turned = (a_BSHR * cos_BS1R - b_BSHR * sin_BS1R, a_BSHR * sin_BS1R + b_BSHR * cos_BS1R)
    return torch.stack(turned, part).flatten(-2).to(x_BSHR.dtype)


IMPLEMENTATIONS = (
    Implementation("rope", EAGER, rope, deterministic=(True, True), saves="x, cos, sin"),
    Implementation("rope", "real", real_rope, deterministic=(True, True), saves="cos, sin"),
)
