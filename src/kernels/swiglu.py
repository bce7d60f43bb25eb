"""The gated activation between the two products of an FFN (OP-5)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from src.kernels.declaration import EAGER, Implementation
from src.kernels.opaque import opaque

BLOCK = 1024


def swiglu(gate_up_N2F: Tensor, *, limit: float | None = None, alpha: float = 1.0) -> Tensor:
    """silu(gate)·up, [N,F]; the gate is the first half (FFN-1).

    With a `limit` the clamped kind: gate at most `limit`, up within ±`limit`, gate·σ(alpha·gate)·(up + 1).
    GLU Variants Improve Transformer (arXiv 2002.05202, eq. 6); the clamped kind as transformers' `gpt_oss`.
    """
    gate_NF, up_NF = gate_up_N2F.chunk(2, -1)
    if limit is None:
        assert alpha == 1, f"alpha={alpha} is a factor of the clamped kind"
        return F.silu(gate_NF) * up_NF
    gate_NF, up_NF = gate_NF.clamp(max=limit), up_NF.clamp(-limit, limit)
    return gate_NF * torch.sigmoid(alpha * gate_NF) * (up_NF + 1)


def _forward(gate_up_N2F: Tensor, limit: float | None, alpha: float) -> Tensor:
    from src.kernels.fused.swiglu import swiglu_kernel

    out_NF = _forward_shape(gate_up_N2F, limit, alpha)
    rows, width = out_NF.shape
    if out_NF.numel():
        swiglu_kernel[(rows, -(-width // BLOCK))](
            gate_up_N2F, out_NF, width, limit or 0.0, alpha, CLAMPED=limit is not None, BLOCK=BLOCK
        )
    return out_NF


def _forward_shape(gate_up_N2F: Tensor, limit: float | None, alpha: float) -> Tensor:
    return gate_up_N2F.new_empty(gate_up_N2F.shape[0], gate_up_N2F.shape[1] // 2)


def _backward(gate_up_N2F: Tensor, grad_NF: Tensor, limit: float | None, alpha: float) -> Tensor:
    from src.kernels.fused.swiglu import swiglu_backward_kernel

    out_N2F = _backward_shape(gate_up_N2F, grad_NF, limit, alpha)
    rows, width = grad_NF.shape
    if out_N2F.numel():
        swiglu_backward_kernel[(rows, -(-width // BLOCK))](
            gate_up_N2F, grad_NF, out_N2F, width, limit or 0.0, alpha, CLAMPED=limit is not None, BLOCK=BLOCK
        )
    return out_N2F


def _backward_shape(gate_up_N2F: Tensor, grad_NF: Tensor, limit: float | None, alpha: float) -> Tensor:
    return gate_up_N2F.new_empty(gate_up_N2F.shape)


_swiglu = opaque("swiglu", "(Tensor gate_up, float? limit, float alpha) -> Tensor", _forward, _forward_shape)
_swiglu_backward = opaque(
    "swiglu_backward",
    "(Tensor gate_up, Tensor grad, float? limit, float alpha) -> Tensor",
    _backward,
    _backward_shape,
)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_N2F: Tensor, limit: float | None, alpha: float) -> Tensor:
        gate_up_N2F = gate_up_N2F.contiguous()
        ctx.save_for_backward(gate_up_N2F)
        ctx.kind = limit, alpha
        out: Tensor = _swiglu(gate_up_N2F, limit, alpha)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gate_up_N2F,) = ctx.saved_tensors
        return _swiglu_backward(gate_up_N2F, grads[0].contiguous(), *ctx.kind), None, None


def triton_swiglu(gate_up_N2F: Tensor, *, limit: float | None = None, alpha: float = 1.0) -> Tensor:
    """`swiglu` in one pass, its gradient in one: no copy puts both halves together."""
    out: Tensor = _SwiGLU.apply(gate_up_N2F, limit, alpha)  # type: ignore[no-untyped-call]
    return out


IMPLEMENTATIONS = (
    Implementation(
        "swiglu",
        EAGER,
        swiglu,
        deterministic=(True, True),
        saves="gate_up, silu(gate)",
        features=frozenset({"clamped"}),
    ),
    Implementation(
        "swiglu",
        "triton",
        triton_swiglu,
        source="triton",
        deterministic=(True, True),
        saves="gate_up",
        features=frozenset({"clamped"}),
        devices=frozenset({"cuda", "rocm"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    ),
)
