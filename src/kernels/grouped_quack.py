"""The grouped products of OP-1 by QuACK's kernels for Hopper (`quack-kernels`, a part of flash-attn-4).

Their tiles fit experts of few rows better than torch's: 4 to 25 % less time a product on an H200 (LOG.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from src.kernels.tail import zero_tail

PACKAGES = {"quack-kernels": ">=0.6.5,<0.7"}
TILE_ROWS = 128
TILES = ((192, 1.0), (160, 0.95))
"""Columns of a tile, and its rate as a share of the wider one's; measured."""


def quack_rows(x_ND: Tensor, w_EMD: Tensor, offs_E: Tensor) -> Tensor:
    """y[a:b] = x[a:b] @ w[e].T for each expert's rows; rows from `offs_E[-1]` on are zero."""
    y_NM = x_ND.new_empty(x_ND.shape[0], w_EMD.shape[1])
    if y_NM.numel():
        product(x_ND, w_EMD.transpose(1, 2), y_NM, cu_seqlens_m=bounds(offs_E))
        zero_tail(y_NM, offs_E)
    return y_NM


def quack_outer(y_NM: Tensor, x_ND: Tensor, offs_E: Tensor) -> Tensor:
    """w[e] = y[a:b].T @ x[a:b], [E,M,D]; an expert without rows gets zeros."""
    shape = (offs_E.shape[0], y_NM.shape[1], x_ND.shape[1])
    if not y_NM.shape[0]:
        return x_ND.new_zeros(shape)
    w_EMD = x_ND.new_empty(shape)
    product(y_NM.T, x_ND, w_EMD, cu_seqlens_k=bounds(offs_E))
    return w_EMD


def tile_columns(columns: int) -> int:
    """The tile that covers `columns` in the least time."""
    return min(TILES, key=lambda tile: -(-columns // tile[0]) * tile[0] / tile[1])[0]


def bounds(offs_E: Tensor) -> Tensor:
    """Starts and the last end of the experts' rows, int32 [E+1]."""
    return torch.cat((offs_E.new_zeros(1), offs_E))


def config(columns: int) -> Any:
    """A `GemmConfig` whose tiles have so many columns, without a counter that hands tiles out."""
    from quack.gemm_config import GemmConfig

    return GemmConfig(TILE_ROWS, columns, is_dynamic_persistent=False)


def product(a: Tensor, b: Tensor, out: Tensor, **options: Any) -> None:
    """out = a·b by groups of rows (`cu_seqlens_m`) or of what is summed over (`cu_seqlens_k`)."""
    from quack.gemm_interface import gemm_tuned

    # The undecorated function with one tile: tuning would time kernels on whatever rows come first.
    gemm_tuned.fn(a, b, out, config=config(tile_columns(b.shape[-1])), **options)
