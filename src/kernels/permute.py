"""Copies of tokens into rows grouped by expert, and back (OP-6).

Each backward is a gather by the inverse order: no atomics, so two runs are bitwise equal on any device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from src.kernels.declaration import EAGER, Implementation


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, row_slot_N: Tensor, slot_row_N: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(slot_row_N)
        ctx.top_k = top_k
        return x_TD.index_select(0, row_slot_N // top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (slot_row_N,) = ctx.saved_tensors
        dy_SD = grads[0].index_select(0, slot_row_N)
        dy_TKD = dy_SD.view(dy_SD.shape[0] // ctx.top_k, ctx.top_k, dy_SD.shape[1])
        return dy_TKD.sum(1), None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, row_slot_N: Tensor, slot_row_N: Tensor) -> Tensor:
        ctx.save_for_backward(row_slot_N)
        return y_ND.index_select(0, slot_row_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (row_slot_N,) = ctx.saved_tensors
        return grads[0].index_select(0, row_slot_N), None, None


def permute(x_TD: Tensor, row_slot_N: Tensor, slot_row_N: Tensor, top_k: int) -> Tensor:
    """Rows [N,D]: row r is the token of slot `row_slot_N[r]` (token = slot // K). N = T·K."""
    out: Tensor = _Permute.apply(x_TD, row_slot_N, slot_row_N, top_k)  # type: ignore[no-untyped-call]
    return out


def unpermute(y_ND: Tensor, row_slot_N: Tensor, slot_row_N: Tensor, top_k: int) -> Tensor:
    """The K rows of each token, [T,K,D]: the inverse order of `permute`, without the sum over k."""
    out: Tensor = _Unpermute.apply(y_ND, row_slot_N, slot_row_N)  # type: ignore[no-untyped-call]
    return out.view(y_ND.shape[0] // top_k, top_k, y_ND.shape[1])


IMPLEMENTATIONS = (Implementation("permute", EAGER, permute, deterministic=(True, True), saves="slot_row"),)
INVERSE_IMPLEMENTATIONS = (
    Implementation("unpermute", EAGER, unpermute, deterministic=(True, True), saves="row_slot"),
)
