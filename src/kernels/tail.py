"""Rows past the last offset of a grouped product, which its kernels leave unset (pytorch #193633)."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 64
"""Rows that one program looks after."""


def zero_tail(y_NM: Tensor, offs_E: Tensor) -> None:
    """Zero the rows from `offs_E[-1]` on, without a look at it: a kernel that mostly does nothing.

    An offset beyond the rows ends the run at the next synchronisation.
    """
    from src.kernels.fused.tail import tail_kernel

    rows, width = y_NM.shape
    torch._assert_async(offs_E[-1] <= rows, "the last offset is beyond the rows")
    if rows:
        programs = (rows + ROWS - 1) // ROWS
        tail_kernel[(programs,)](y_NM, offs_E, offs_E.shape[0], rows, WIDTH=width, ROWS=ROWS, BLOCK=1024)
