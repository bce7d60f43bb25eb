"""Products in fp8 by fp64 arithmetic alone: no dtype of 8 bits, no function of ours (FP8-1, FP8-4)."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)
"""Bits after the point, least normal exponent, largest number."""
Format = tuple[int, int, float]


def rounded(x: Tensor, form: Format) -> Tensor:
    """The nearest numbers of a format, ties to even; subnormal ones have the step of the least exponent."""
    bits, least, largest = form
    exponent = torch.frexp(x.double()).exponent - 1
    step = torch.exp2((exponent.clamp(min=least) - bits).double())
    return ((x.double() / step).round() * step).clamp(-largest, largest)


def as_fp8(x: Tensor, form: Format, by_rows: bool) -> Tensor:
    """What the numbers in fp8 stand for, with one scale for all or one a row."""
    size = x.double().abs()
    largest = size.amax(-1, keepdim=True) if by_rows else size.amax()
    scale = torch.where(largest > 0, largest, 1.0) / form[2]
    return rounded(x.double() / scale, form) * scale


def linear(x: Tensor, w: Tensor, b: Tensor, dy: Tensor, by_rows: bool) -> list[Tensor]:
    """y, dx, dw, db of a projection, x [T,in], w [out,in]."""
    y = as_fp8(x, E4M3, by_rows) @ as_fp8(w, E4M3, by_rows).T + b.double()
    dy8 = as_fp8(dy, E4M3 if by_rows else E5M2, by_rows)
    dx = dy8 @ as_fp8(w.T, E4M3, by_rows).T
    dw = dy.double().T @ x.double() if by_rows else dy8.T @ as_fp8(x, E4M3, by_rows=False)
    return [y, dx, dw, dy.double().sum(0)]


def grouped(x: Tensor, w: Tensor, counts: list[int], dy: Tensor) -> list[Tensor]:
    """y, dx, dw of a grouped product, x [N,in], w [E,out,in]; rows past the counts give zeros."""
    y, dx = dy.double() * 0, x.double() * 0
    dw = w.double() * 0
    start = 0
    for expert, count in enumerate(counts):
        rows, start = slice(start, start + count), start + count
        y[rows] = as_fp8(x[rows], E4M3, by_rows=True) @ as_fp8(w[expert], E4M3, by_rows=True).T
        dx[rows] = as_fp8(dy[rows], E4M3, by_rows=True) @ as_fp8(w[expert].T, E4M3, by_rows=True).T
        dw[expert] = dy[rows].double().T @ x[rows].double()
    return [y, dx, dw]
