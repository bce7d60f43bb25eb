"""Weighted sum of a token's expert outputs onto its residual (OP-6)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from src.kernels.declaration import EAGER, Implementation
from src.kernels.dtypes import narrow, widen
from src.kernels.rows import gather_sum, weighted_spread

Gradients = tuple[Tensor, None, Tensor, Tensor]


class _Combine(torch.autograd.Function):
    """Autograd's own rule would stack the K gradients one by one."""

    @staticmethod
    def forward(
        ctx: Any, y_ND: Tensor, slot_row_TK: Tensor, weights_TK: Tensor, residual_TD: Tensor
    ) -> Tensor:
        y_TKD = y_ND.index_select(0, slot_row_TK.flatten()).view(*weights_TK.shape, y_ND.shape[1])
        ctx.save_for_backward(y_TKD, slot_row_TK, weights_TK)
        out_TD = widen(residual_TD)
        for y_TD, weight_T in zip(widen(y_TKD).unbind(1), weights_TK.unbind(1), strict=True):
            out_TD = torch.addcmul(out_TD, y_TD, weight_T[:, None])
        return narrow(out_TD, residual_TD.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        y_TKD, slot_row_TK, weights_TK = ctx.saved_tensors
        wide_T1D = widen(grads[0])[:, None]
        dy_SD = (wide_T1D * weights_TK[..., None]).to(y_TKD.dtype).flatten(0, 1)
        dweights_TK = (widen(y_TKD) * wide_T1D).sum(-1).to(weights_TK.dtype)
        return dy_SD.index_select(0, _inverse(slot_row_TK.flatten())), None, dweights_TK, grads[0]


def _inverse(permutation_N: Tensor) -> Tensor:
    places_N = torch.arange(permutation_N.numel(), device=permutation_N.device)
    return torch.empty_like(places_N).scatter(0, permutation_N.long(), places_N)


class _TritonCombine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y_ND: Tensor, slot_row_TK: Tensor, weights_TK: Tensor, residual_TD: Tensor
    ) -> Tensor:
        ctx.save_for_backward(y_ND, slot_row_TK, weights_TK)
        out_TD: Tensor = gather_sum(y_ND, slot_row_TK, weights_TK, residual_TD)
        return out_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        dy_ND, dweights_TK = weighted_spread(grads[0], *ctx.saved_tensors)
        return dy_ND, None, dweights_TK, grads[0]


def combine(y_ND: Tensor, slot_row_TK: Tensor, weights_TK: Tensor, residual_TD: Tensor) -> Tensor:
    """residual + Σ_k w_k·y[row_k], [T,D]: k ascending, in fp32 at least, rounded to the residual's dtype.

    `slot_row_TK`, int32 or int64, is the row of each slot, a bijection: N = T·K.
    """
    given = (y_ND, slot_row_TK, weights_TK, residual_TD)
    out_TD: Tensor = _Combine.apply(*given)  # type: ignore[no-untyped-call]
    return out_TD


def triton_combine(y_ND: Tensor, slot_row_TK: Tensor, weights_TK: Tensor, residual_TD: Tensor) -> Tensor:
    """`combine` in one pass over the rows where they lie, and one back that writes both gradients."""
    given = (y_ND, slot_row_TK, weights_TK, residual_TD)
    out_TD: Tensor = _TritonCombine.apply(*given)  # type: ignore[no-untyped-call]
    return out_TD


IMPLEMENTATIONS = (
    Implementation("combine", EAGER, combine, deterministic=(True, True), saves="y, slot_row, weights"),
    Implementation(
        "combine",
        "triton",
        triton_combine,
        source="triton",
        deterministic=(True, True),
        saves="y, slot_row, weights",
        devices=frozenset({"cuda", "rocm"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    ),
)
