"""Forward and backward of `local_experts` by QuACK's kernels for Hopper.

Gate and up of a row lie side by side in what its products store, (g0, u0, g1, u1, …), while the weight keeps
its halves: `concat_layout` names the operand that has them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from src.kernels.grouped_quack import bounds, config, product
from src.kernels.rows import gather_sum

GATED, UNGATED = 192, 128
"""Columns of a tile of the product with an activation, and with its gradient, which spills above (LOG.md)."""


def forward(
    tokens_TD: Tensor,
    weights_TK: Tensor,
    residual_TD: Tensor,
    row_slot_N: Tensor,
    slot_row_N: Tensor,
    offs_E: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
) -> tuple[Tensor, Tensor]:
    """The hidden state [T,D], and gate and up [N,2F] side by side."""
    from quack.gemm_interface import gemm_gated

    rows_ND = tokens_TD.index_select(0, row_slot_N // weights_TK.shape[1])
    ends = bounds(offs_E)
    pairs_N2F, inner_NF = gemm_gated(
        rows_ND, gate_up_E2FD.transpose(1, 2), activation="swiglu", cu_seqlens_m=ends,
        concat_layout=("B",), config=config(GATED), tuned=False,
    )  # fmt: skip
    product(inner_NF, down_EDF.transpose(1, 2), rows_ND, cu_seqlens_m=ends)
    out_TD = gather_sum(rows_ND, slot_row_N.view(weights_TK.shape), weights_TK, residual_TD)
    return out_TD, pairs_N2F


def backward(
    grad_TD: Tensor,
    tokens_TD: Tensor,
    weights_TK: Tensor,
    row_slot_N: Tensor,
    slot_row_N: Tensor,
    offs_E: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    pairs_N2F: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of tokens, weights, gate_up and down."""
    from quack.gemm_interface import gemm_dgated

    token_N, ends = row_slot_N // weights_TK.shape[1], bounds(offs_E)
    rows_ND = grad_TD.index_select(0, token_N)
    dpairs_N2F, inner_NF, dweight_N = gemm_dgated(
        rows_ND, down_EDF, pairs_N2F, activation="swiglu", cu_seqlens_m=ends,
        colvec_scale=weights_TK.flatten().index_select(0, row_slot_N), colvec_reduce=True,
        dynamic_scheduler=False, config=config(UNGATED), tuned=False,
    )  # fmt: skip
    ddown_EDF, dgate_up_E2FD = torch.empty_like(down_EDF), torch.empty_like(gate_up_E2FD)
    product(rows_ND.T, inner_NF, ddown_EDF, cu_seqlens_k=ends)
    del inner_NF
    torch.index_select(tokens_TD, 0, token_N, out=rows_ND)
    product(dpairs_N2F.T, rows_ND, dgate_up_E2FD, cu_seqlens_k=ends, concat_layout=("out",))
    product(dpairs_N2F, gate_up_E2FD, rows_ND, cu_seqlens_m=ends, concat_layout=("B",))
    dweights_TK = dweight_N.index_select(0, slot_row_N).view(weights_TK.shape).to(weights_TK.dtype)
    dtokens_TD = gather_sum(rows_ND, slot_row_N.view(weights_TK.shape), None, None)
    return dtokens_TD, dweights_TK, dgate_up_E2FD, ddown_EDF


def forward_shapes(
    tokens_TD: Tensor, weights_TK: Tensor, residual_TD: Tensor, *rest: Tensor
) -> tuple[Tensor, Tensor]:
    """Shapes of what `forward` returns."""
    gate_up_E2FD = rest[3]
    return torch.empty_like(residual_TD), tokens_TD.new_empty(weights_TK.numel(), gate_up_E2FD.shape[1])


def backward_shapes(
    grad_TD: Tensor, tokens_TD: Tensor, weights_TK: Tensor, *rest: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shapes of what `backward` returns."""
    gate_up_E2FD, down_EDF = rest[3:5]
    tokens, weights = tokens_TD.new_empty(tokens_TD.shape), weights_TK.new_empty(weights_TK.shape)
    return tokens, weights, gate_up_E2FD.new_empty(gate_up_E2FD.shape), down_EDF.new_empty(down_EDF.shape)
