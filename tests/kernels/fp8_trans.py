"""A kernel that transposes one fp8 tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def kernel(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tile = tl.load(x + row[:, None] * COLUMNS + column[None, :])
    tl.store(out + column[:, None] * ROWS + row[None, :], tl.trans(tile))


def transposed(x: Tensor) -> Tensor:
    """x.T of an fp8 [ROWS,COLUMNS] whose sizes are powers of two."""
    out = torch.empty(x.shape[1], x.shape[0], dtype=x.dtype, device=x.device)
    kernel[(1,)](x, out, ROWS=x.shape[0], COLUMNS=x.shape[1])
    return out
