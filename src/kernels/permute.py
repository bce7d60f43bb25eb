"""Copies of tokens into rows, and the sum of a token's rows that is their gradient (OP-6).

The backward gathers by the inverse order: no atomics, so two runs are bitwise equal on any device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from src.kernels.declaration import EAGER, Implementation
from src.kernels.dtypes import widen
from src.kernels.rows import gather_sum, spread

Gradients = tuple[Tensor, None, None]


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, row_token_N: Tensor, slot_row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(slot_row_TK)
        return x_TD.index_select(0, row_token_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        (slot_row_TK,), (dy_ND,) = ctx.saved_tensors, grads
        if slot_row_TK.numel() != dy_ND.shape[0]:  # Some slots have no row: one of zeros.
            dy_ND = torch.cat((dy_ND, dy_ND.new_zeros(1, dy_ND.shape[1])))
        first_T, *others = slot_row_TK.unbind(1)
        total_TD = widen(dy_ND.index_select(0, first_T))
        for row_T in others:
            total_TD = total_TD + dy_ND.index_select(0, row_T)
        return total_TD.to(dy_ND.dtype), None, None


class _TritonPermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, row_token_N: Tensor, slot_row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(slot_row_TK)
        rows_ND: Tensor = spread(x_TD, row_token_N, slot_row_TK)
        return rows_ND

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        return gather_sum(grads[0], *ctx.saved_tensors, None, None), None, None


def permute(x_TD: Tensor, row_token_N: Tensor, slot_row_TK: Tensor) -> Tensor:
    """Rows [N,D]: row r is token `row_token_N[r]`.

    `slot_row_TK` is the inverse: the rows of each token, all of them, where N stands for none; a token's
    gradient is their sum, k ascending, in fp32 at least. Both are int32 or int64.
    """
    out: Tensor = _Permute.apply(x_TD, row_token_N, slot_row_TK)  # type: ignore[no-untyped-call]
    return out


def triton_permute(x_TD: Tensor, row_token_N: Tensor, slot_row_TK: Tensor) -> Tensor:
    """`permute` that reads a token once; its backward adds rows up where they lie."""
    out: Tensor = _TritonPermute.apply(x_TD, row_token_N, slot_row_TK)  # type: ignore[no-untyped-call]
    return out


IMPLEMENTATIONS = (
    Implementation("permute", EAGER, permute, deterministic=(True, True), saves="slot_row"),
    Implementation(
        "permute",
        "triton",
        triton_permute,
        source="triton",
        deterministic=(True, True),
        saves="slot_row",
        devices=frozenset({"cuda", "rocm"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    ),
)
