"""A bias of each expert on its own rows (OP-12)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from src.kernels.blocks import power_of_two
from src.kernels.declaration import EAGER, Implementation
from src.kernels.opaque import opaque

BLOCK = 1024
"""Columns of a row that one program adds to."""
ROWS, COLUMNS, TILES = 64, 64, 32
"""Tile whose rows one program of the backward sums, and such tiles that the second stage reads at once."""


def expert_bias(rows_RM: Tensor, bias_EM: Tensor, offs_E: Tensor) -> Tensor:
    """rows[a:b] + bias[e] for each expert's rows; `offs_E` int32 are their ends. Returns [R,M].

    Rows from `offs_E[-1]` on are zero, whatever they held, and give no gradient (ENG-19). Rows choose their
    bias by a product with a matrix of ones and zeros, so that the bias's gradient is the transposed product:
    sums in one order, without atomics, and without a look at the offsets.
    """
    places_R1 = torch.arange(rows_RM.shape[0], dtype=offs_E.dtype, device=offs_E.device)[:, None]
    starts_E = torch.cat((offs_E.new_zeros(1), offs_E[:-1]))
    held_RE = (places_R1 >= starts_E) & (places_R1 < offs_E)
    sums_RM = torch.addmm(rows_RM, held_RE.to(bias_EM.dtype), bias_EM)
    return torch.where(places_R1 < offs_E[-1:], sums_RM, 0)


def _forward(rows_RM: Tensor, bias_EM: Tensor, offs_E: Tensor) -> Tensor:
    from src.kernels.fused.expert_bias import expert_bias_kernel

    out_RM = _forward_shape(rows_RM, bias_EM, offs_E)
    rows, width = rows_RM.shape
    if out_RM.numel():
        experts = bias_EM.shape[0]
        expert_bias_kernel[(rows, -(-width // BLOCK))](
            rows_RM, bias_EM, offs_E, out_RM, width, E=experts, BLOCK_E=power_of_two(experts), BLOCK=BLOCK
        )
    return out_RM


def _forward_shape(rows_RM: Tensor, bias_EM: Tensor, offs_E: Tensor) -> Tensor:
    return rows_RM.new_empty(rows_RM.shape)


def _backward(grad_RM: Tensor, bias_EM: Tensor, offs_E: Tensor) -> tuple[Tensor, Tensor]:
    from src.kernels.fused.expert_bias import expert_bias_parts_kernel, expert_bias_sum_kernel

    drows_RM, dbias_EM = _backward_shapes(grad_RM, bias_EM, offs_E)
    (rows, width), experts = grad_RM.shape, bias_EM.shape[0]
    if not drows_RM.numel():
        return drows_RM, dbias_EM.zero_()
    tiles, columns = -(-rows // ROWS), -(-width // COLUMNS)
    parts_PM = grad_RM.new_empty(tiles + experts, width, dtype=torch.float32)
    expert_bias_parts_kernel[(tiles, columns)](
        grad_RM, offs_E, drows_RM, parts_PM, rows, width, E=experts, BLOCK_E=power_of_two(experts), ROWS=ROWS,
        BLOCK=COLUMNS,
    )  # fmt: skip
    expert_bias_sum_kernel[(experts, columns)](
        parts_PM, offs_E, dbias_EM, width, ROWS=ROWS, TILES=TILES, BLOCK=COLUMNS
    )
    return drows_RM, dbias_EM


def _backward_shapes(grad_RM: Tensor, bias_EM: Tensor, offs_E: Tensor) -> tuple[Tensor, Tensor]:
    return grad_RM.new_empty(grad_RM.shape), bias_EM.new_empty(bias_EM.shape)


_add = opaque("expert_bias", "(Tensor rows, Tensor bias, Tensor offs) -> Tensor", _forward, _forward_shape)
_add_backward = opaque(
    "expert_bias_backward",
    "(Tensor grad, Tensor bias, Tensor offs) -> (Tensor, Tensor)",
    _backward,
    _backward_shapes,
)


class _ExpertBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RM: Tensor, bias_EM: Tensor, offs_E: Tensor) -> Tensor:
        ctx.save_for_backward(bias_EM, offs_E)
        out_RM: Tensor = _add(rows_RM.contiguous(), bias_EM.contiguous(), offs_E)
        return out_RM

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        drows_RM, dbias_EM = _add_backward(grads[0].contiguous(), *ctx.saved_tensors)
        return drows_RM, dbias_EM, None


def triton_expert_bias(rows_RM: Tensor, bias_EM: Tensor, offs_E: Tensor) -> Tensor:
    """`expert_bias` in one pass; in its backward each row is read once, for its gradient and its bias's."""
    out_RM: Tensor = _ExpertBias.apply(rows_RM, bias_EM, offs_E)  # type: ignore[no-untyped-call]
    return out_RM


IMPLEMENTATIONS = (
    Implementation(
        "expert_bias", EAGER, expert_bias, deterministic=(True, True), saves="who holds which row"
    ),
    Implementation(
        "expert_bias",
        "triton",
        triton_expert_bias,
        source="triton",
        deterministic=(True, True),
        saves="bias, offsets",
        devices=frozenset({"cuda", "rocm"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    ),
)
