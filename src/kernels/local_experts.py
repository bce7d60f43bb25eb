"""Stages 2 to 5 of a mixture's layer in one, where one rank holds all experts: tokens in, hidden state out.

What the backward pass needs of the routed rows is gathered and computed again: neither the rows nor the inner
activations nor the experts' outputs are kept, 1 GiB a layer of DeepSeek-V2-Lite at 16,384 tokens. The weight
of a row goes into the gradient of its activation (arXiv 2512.14080, sec. 3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from src.kernels import local_quack
from src.kernels.combine import combine
from src.kernels.declaration import EAGER, Implementation
from src.kernels.grouped_mm import aligned, grouped_mm
from src.kernels.grouped_quack import PACKAGES
from src.kernels.opaque import opaque
from src.kernels.permute import permute
from src.kernels.sort_by_expert import Order
from src.kernels.swiglu import swiglu

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def local_experts(
    tokens_TD: Tensor,
    weights_TK: Tensor,
    residual_TD: Tensor,
    order: Order,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
) -> Tensor:
    """residual + Σ_k w_k·down(silu(gate x)·up x) of each token's K experts, [T,D].

    `order` is that of `sort_by_expert`. A model for which this is chosen computes its stages one by one, as
    meshes do; here they stand together to compare with. DeepSeekMoE (arXiv 2401.06066, eq. 3 to 5).
    """
    slot_row_TK = order.slot_row_N.view(weights_TK.shape)
    rows_ND = permute(tokens_TD, order.row_slot_N // weights_TK.shape[1], slot_row_TK)
    gate_up_N2F = grouped_mm(rows_ND, gate_up_E2FD, order.offs_E)
    rows_ND = grouped_mm(swiglu(gate_up_N2F), down_EDF, order.offs_E)
    return combine(rows_ND, slot_row_TK, weights_TK, residual_TD)


_forward = opaque(
    "local_experts",
    "(Tensor tokens, Tensor weights, Tensor residual, Tensor row_slot, Tensor slot_row, Tensor offs, "
    "Tensor gate_up, Tensor down) -> (Tensor, Tensor)",
    local_quack.forward,
    local_quack.forward_shapes,
)
_backward = opaque(
    "local_experts_backward",
    "(Tensor grad, Tensor tokens, Tensor weights, Tensor row_slot, Tensor slot_row, Tensor offs, "
    "Tensor gate_up, Tensor down, Tensor inner) -> (Tensor, Tensor, Tensor, Tensor)",
    local_quack.backward,
    local_quack.backward_shapes,
)


class _LocalExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens_TD: Tensor,
        weights_TK: Tensor,
        residual_TD: Tensor,
        row_slot_N: Tensor,
        slot_row_N: Tensor,
        offs_E: Tensor,
        gate_up_E2FD: Tensor,
        down_EDF: Tensor,
    ) -> Tensor:
        order, experts = (row_slot_N, slot_row_N, offs_E), (gate_up_E2FD, down_EDF)
        out_TD: Tensor
        out_TD, inner_N2F = _forward(tokens_TD, weights_TK, residual_TD, *order, *experts)
        ctx.save_for_backward(tokens_TD, weights_TK, *order, *experts, inner_N2F)
        return out_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dtokens, dweights, dgate_up, ddown = _backward(grads[0].contiguous(), *ctx.saved_tensors)
        return dtokens, dweights, grads[0], None, None, None, dgate_up, ddown


def quack_local_experts(
    tokens_TD: Tensor,
    weights_TK: Tensor,
    residual_TD: Tensor,
    order: Order,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
) -> Tensor:
    """`local_experts` by QuACK's products, which apply the activation and its gradient as they store.

    Its kernels take no empty rows; without tokens the reference keeps the graph.
    """
    if not tokens_TD.shape[0]:
        return local_experts(tokens_TD, weights_TK, residual_TD, order, gate_up_E2FD, down_EDF)
    out_TD: Tensor = _LocalExperts.apply(  # type: ignore[no-untyped-call]
        tokens_TD.contiguous(),
        weights_TK.contiguous(),
        residual_TD.contiguous(),
        *order,
        gate_up_E2FD,
        down_EDF,
    )
    return out_TD


IMPLEMENTATIONS = (
    Implementation(
        "local_experts",
        EAGER,
        local_experts,
        deterministic=(True, True),
        saves="rows, gate_up, inner, outputs",
        # Chosen, it leaves the stages to the layer, one by one.
        features=frozenset({"biased_experts", "fp8_experts"}),
    ),
    Implementation(
        "local_experts",
        "quack",
        quack_local_experts,
        source="library",
        deterministic=(True, True),
        saves="tokens, weights, gate_up",
        devices=frozenset({"cuda"}),
        archs=frozenset({"sm90"}),
        dtypes=frozenset({torch.bfloat16}),
        packages=PACKAGES,
        shapes=aligned,
    ),
)
