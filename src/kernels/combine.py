"""Weighted sum of a token's expert outputs onto its residual (OP-6)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from src.kernels.declaration import EAGER, Implementation
from src.kernels.dtypes import narrow, widen


class _Combine(torch.autograd.Function):
    """Autograd's own rule would stack the K gradients one by one."""

    @staticmethod
    def forward(ctx: Any, y_TKD: Tensor, weights_TK: Tensor, residual_TD: Tensor) -> Tensor:
        ctx.save_for_backward(y_TKD, weights_TK)
        out_TD = widen(residual_TD)
        for y_TD, weight_T in zip(widen(y_TKD).unbind(1), weights_TK.unbind(1), strict=True):
            out_TD = torch.addcmul(out_TD, y_TD, weight_T[:, None])
        return narrow(out_TD, residual_TD.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y_TKD, weights_TK = ctx.saved_tensors
        wide_T1D = widen(grads[0])[:, None]
        dy_TKD = (wide_T1D * weights_TK[..., None]).to(y_TKD.dtype)
        return dy_TKD, (widen(y_TKD) * wide_T1D).sum(-1).to(weights_TK.dtype), grads[0]


def combine(y_TKD: Tensor, weights_TK: Tensor, residual_TD: Tensor) -> Tensor:
    """residual + Σ_k w_k·y_k, k ascending, in fp32 at least, rounded once to the residual's dtype; [T,D]."""
    out_TD: Tensor = _Combine.apply(y_TKD, weights_TK, residual_TD)  # type: ignore[no-untyped-call]
    return out_TD


IMPLEMENTATIONS = (Implementation("combine", EAGER, combine, deterministic=(True, True), saves="y, weights"),)
