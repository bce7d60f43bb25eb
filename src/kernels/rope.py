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
    turn = _neighbours if interleaved else _halves
    return turn(widen(x_BSHR), cos_BSR[:, :, None], sin_BSR[:, :, None]).to(x_BSHR.dtype)


def _neighbours(x_BSHR: Tensor, cos_BS1R: Tensor, sin_BS1R: Tensor) -> Tensor:
    """As a product of complex numbers: on CPU a third of the time of the same in real numbers."""
    pairs_BSHR2 = x_BSHR.reshape(*x_BSHR.shape[:-1], -1, 2)
    turned = torch.view_as_complex(pairs_BSHR2) * torch.complex(cos_BS1R, sin_BS1R)
    return torch.view_as_real(turned).flatten(-2)


def _halves(x_BSHR: Tensor, cos_BS1R: Tensor, sin_BS1R: Tensor) -> Tensor:
    """In real numbers, since the parts of a complex one lie apart here."""
    a, b = x_BSHR.chunk(2, -1)
    return torch.cat((a * cos_BS1R - b * sin_BS1R, b * cos_BS1R + a * sin_BS1R), -1)


IMPLEMENTATIONS = (Implementation("rope", EAGER, rope, deterministic=(True, True), saves="x, cos, sin"),)
