"""The passes between tokens and their rows, each one kernel, for `permute`, `combine` and `local_experts`.

`slot_row_TK`, int32 or int64, names the rows of each token; two slots never name one row. The number of rows
stands for none.
"""

from __future__ import annotations

from torch import Tensor

from src.kernels.blocks import power_of_two
from src.kernels.opaque import opaque

BLOCK = 2048
"""Columns of a program."""
ELEMENTS = 16384
"""Of the tile of a token's rows that one program of a gradient holds."""


def _spread(x_TD: Tensor, row_token_N: Tensor, slot_row_TK: Tensor) -> Tensor:
    from src.kernels.fused.rows import spread_kernel

    x_TD, out_ND = x_TD.contiguous(), _spread_shape(x_TD, row_token_N, slot_row_TK)
    (tokens, width), top_k = x_TD.shape, slot_row_TK.shape[1]
    if out_ND.numel():
        spread_kernel[(tokens, -(-width // BLOCK))](
            x_TD, slot_row_TK.contiguous(), out_ND, out_ND.shape[0], width, TOP_K=top_k, BLOCK=BLOCK,
            num_warps=8,
        )  # fmt: skip
    return out_ND


def _spread_shape(x_TD: Tensor, row_token_N: Tensor, slot_row_TK: Tensor) -> Tensor:
    return x_TD.new_empty(row_token_N.shape[0], x_TD.shape[1])


def _gather_sum(
    rows_ND: Tensor, slot_row_TK: Tensor, weights_TK: Tensor | None, residual_TD: Tensor | None
) -> Tensor:
    from src.kernels.fused.rows import gather_sum_kernel

    rows_ND, out_TD = rows_ND.contiguous(), _gather_sum_shape(rows_ND, slot_row_TK, None, residual_TD)
    tokens, width = out_TD.shape
    if out_TD.numel():
        gather_sum_kernel[(tokens, -(-width // BLOCK))](
            rows_ND, slot_row_TK.contiguous(), rows_ND if weights_TK is None else weights_TK.contiguous(),
            rows_ND if residual_TD is None else residual_TD.contiguous(), out_TD, rows_ND.shape[0], width,
            TOP_K=slot_row_TK.shape[1], WEIGHTED=weights_TK is not None, ONTO=residual_TD is not None,
            BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return out_TD


def _gather_sum_shape(
    rows_ND: Tensor, slot_row_TK: Tensor, weights_TK: Tensor | None, residual_TD: Tensor | None
) -> Tensor:
    like = rows_ND if residual_TD is None else residual_TD
    return like.new_empty(slot_row_TK.shape[0], rows_ND.shape[1])


def _weighted_spread(
    dout_TD: Tensor, rows_ND: Tensor, slot_row_TK: Tensor, weights_TK: Tensor
) -> tuple[Tensor, Tensor]:
    from src.kernels.fused.rows import weighted_spread_kernel

    drows_ND, dweights_TK = _weighted_spread_shapes(dout_TD, rows_ND, slot_row_TK, weights_TK)
    (tokens, width), top_k = dout_TD.shape, weights_TK.shape[1]
    if drows_ND.numel():
        height = power_of_two(top_k)
        block = min(power_of_two(width), ELEMENTS // height)
        weighted_spread_kernel[(tokens,)](
            dout_TD.contiguous(), rows_ND.contiguous(), slot_row_TK.contiguous(), weights_TK.contiguous(),
            drows_ND, dweights_TK, D=width, TOP_K=top_k, BLOCK_K=height, BLOCK=block,
            num_warps=8 if height * block > ELEMENTS // 2 else 4,
        )  # fmt: skip
    return drows_ND, dweights_TK


def _weighted_spread_shapes(
    dout_TD: Tensor, rows_ND: Tensor, slot_row_TK: Tensor, weights_TK: Tensor
) -> tuple[Tensor, Tensor]:
    return rows_ND.new_empty(rows_ND.shape), weights_TK.new_empty(weights_TK.shape)


spread = opaque(
    "spread_rows", "(Tensor x, Tensor row_token, Tensor slot_row) -> Tensor", _spread, _spread_shape
)
"""Each token [T,D] copied to its rows, [N,D]; every row is some token's, which `row_token_N` says."""

gather_sum = opaque(
    "gather_sum",
    "(Tensor rows, Tensor slot_row, Tensor? weights, Tensor? residual) -> Tensor",
    _gather_sum,
    _gather_sum_shape,
)
"""residual + Σ_k w_k·rows[slot_row[t,k]], [T,D], in fp32 and k ascending.

Either may be None: no residual, weights of 1. Rounded once, to the residual's dtype, else that of the rows.
"""

weighted_spread = opaque(
    "weighted_spread_rows",
    "(Tensor dout, Tensor rows, Tensor slot_row, Tensor weights) -> (Tensor, Tensor)",
    _weighted_spread,
    _weighted_spread_shapes,
)
"""Gradients of a weighted `gather_sum` in which every row has a slot: of rows [N,D] and of weights [T,K]."""
