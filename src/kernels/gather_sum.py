"""Sum of a token's K rows, each with its weight, onto a residual: one pass, in fp32, k ascending."""

from __future__ import annotations

from torch import Tensor

BLOCK = 2048
"""Columns of a program."""


def gather_sum(rows_ND: Tensor, slot_row_N: Tensor, weights_TK: Tensor, residual_TD: Tensor | None) -> Tensor:
    """residual + Σ_k w_k·rows[slot_row[t·K + k]], [T,D]; without a residual the plain sum, w_k left out."""
    from src.kernels.fused.gather_sum import gather_sum_kernel

    (tokens, top_k), width = weights_TK.shape, rows_ND.shape[1]
    out_TD = rows_ND.new_empty(tokens, width)
    if tokens:
        gather_sum_kernel[(tokens, (width + BLOCK - 1) // BLOCK)](
            rows_ND, slot_row_N, weights_TK, out_TD if residual_TD is None else residual_TD, out_TD, width,
            TOP_K=top_k, WEIGHTED=residual_TD is not None, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return out_TD
