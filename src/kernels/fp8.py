"""Numbers of 8 bits: scales, and a weight in the two forms that its products read (FP8-2, FP8-4).

x ≈ scale·x8 with scale = max|x| / largest number of the format, over the whole tensor or over each of its
rows (Micikevicius et al., arXiv 2209.05433, sec. 3, with the scale of now instead of that of earlier steps).
Scales stay on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from src.kernels.dtypes import widen

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_ARCHS = frozenset({"sm89", "sm90", "sm100", "sm103", "sm120"})
"""Architectures that multiply numbers of 8 bits."""
MULTIPLE = 16
"""What the widths of such a product are multiples of."""
SMALLEST = 2.0**-100
"""Least maximum that a scale is made of, so that zeros have one and no reciprocal overflows."""


class Quantised(NamedTuple):
    """A weight [out,in] or stack [E,out,in] twice in e4m3, each row-major with the summed dimension last."""

    rows: Tensor
    """[...,out,in], for the forward product."""
    columns: Tensor
    """[...,in,out], for the gradient of the input."""
    rows_scale: Tensor
    """fp32, one of all numbers [] or one of each row [...,out]."""
    columns_scale: Tensor
    """fp32, [] or [...,in]."""


def scale_of(x: Tensor, dtype: torch.dtype, by_rows: bool) -> Tensor:
    """fp32 scale of `x` as `dtype`: [], or by rows one for each position of all dimensions but the last."""
    low, high = torch.aminmax(x, dim=-1) if by_rows else torch.aminmax(x)
    largest = torch.maximum(-low, high).to(torch.float32)
    return largest.clamp(min=SMALLEST) / torch.finfo(dtype).max


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale rounded to `dtype`; `scale` is that of `scale_of`. Not finite becomes NaN."""
    return (widen(x) / (scale[..., None] if scale.dim() else scale)).to(dtype)


def quantise(x: Tensor, dtype: torch.dtype, by_rows: bool) -> tuple[Tensor, Tensor]:
    """`x` in 8 bits, row-major, and its scale."""
    scale = scale_of(x, dtype, by_rows)
    return cast(x, scale, dtype).contiguous(), scale


def dequantise(x8: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """scale·x8 in `dtype`."""
    return x8.to(dtype) * (scale[..., None] if scale.dim() else scale).to(dtype)
