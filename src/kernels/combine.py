"""Weighted sum of a token's expert outputs onto its residual (OP-6)."""

from __future__ import annotations

import torch
from torch import Tensor

from src.kernels.declaration import EAGER, Implementation
from src.kernels.dtypes import widen


def combine(y_TKD: Tensor, weights_TK: Tensor, residual_TD: Tensor) -> Tensor:
    """residual + Σ_k w_k·y_k, k ascending, in fp32 at least, rounded once to the residual's dtype; [T,D]."""
    out_TD = widen(residual_TD)
    for y_TD, weight_T in zip(widen(y_TKD).unbind(1), weights_TK.unbind(1), strict=True):
        out_TD = torch.addcmul(out_TD, y_TD, weight_T[:, None])
    return out_TD.to(residual_TD.dtype)


IMPLEMENTATIONS = (Implementation("combine", EAGER, combine, deterministic=(True, True), saves="y, weights"),)
