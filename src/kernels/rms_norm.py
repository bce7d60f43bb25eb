"""Root mean square norm, alone or of a sum (OP-10)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from src.kernels.blocks import power_of_two
from src.kernels.declaration import EAGER, Implementation
from src.kernels.dtypes import widen
from src.kernels.opaque import opaque

Pair = tuple[Tensor, Tensor]
TILE, STEPS = 4096, 16
"""Elements that a program holds at once, and how many times a program of the backward does so."""


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, residual: Tensor | None = None) -> Pair:
    """t·w / √(mean t² + eps) over the last dimension, and t, which is `x`, or x + residual if there is one.

    In fp32 at least, rounded once to the dtype of `x`; the sum is rounded before its norm is taken. Root Mean
    Square Layer Normalization (arXiv 1910.07467, eq. 4), with eps inside the root.
    """
    total = x if residual is None else x + residual
    wide = widen(total)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight_D).to(x.dtype), total


def _norm(x_TD: Tensor, gain_D: Tensor, eps: float, residual_TD: Tensor | None, total_TD: Tensor) -> Tensor:
    from src.kernels.fused.rms_norm import rms_norm_kernel

    y_TD = torch.empty_like(total_TD)
    rows, sizes = x_TD.shape[0], _sizes(x_TD)
    if y_TD.numel():
        rms_norm_kernel[(-(-rows // sizes["ROWS"]),)](
            x_TD, total_TD if residual_TD is None else residual_TD, gain_D, y_TD, total_TD, rows,
            x_TD.stride(0), eps, JOINED=residual_TD is not None, **sizes,
        )  # fmt: skip
    return y_TD


def _sizes(x_TD: Tensor) -> dict[str, int]:
    """Constants of the kernels: the width, rows and columns of a program's tile, and its warps."""
    block = power_of_two(x_TD.shape[1])
    tile = {"ROWS": max(1, TILE // block), "BLOCK": block}
    return {"D": x_TD.shape[1], **tile, "num_warps": 8 if block <= TILE else 16}


def _alone(x_TD: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    return _norm(x_TD, gain_D, eps, None, x_TD.new_empty(x_TD.shape))


def _alone_shape(x_TD: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    return x_TD.new_empty(x_TD.shape)


def _joined(x_TD: Tensor, gain_D: Tensor, eps: float, residual_TD: Tensor) -> Pair:
    total_TD = x_TD.new_empty(x_TD.shape)
    return _norm(x_TD, gain_D, eps, residual_TD, total_TD), total_TD


def _joined_shapes(x_TD: Tensor, gain_D: Tensor, eps: float, residual_TD: Tensor) -> Pair:
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(x_TD.shape)


def _backward(dy_TD: Tensor, x_TD: Tensor, gain_D: Tensor, eps: float, dtotal_TD: Tensor | None) -> Pair:
    from src.kernels.fused.rms_norm import rms_norm_backward_kernel

    dx_TD, parts_PD = _backward_shapes(dy_TD, x_TD, gain_D, eps, dtotal_TD)
    if dx_TD.numel():
        rms_norm_backward_kernel[(parts_PD.shape[0],)](
            dy_TD, x_TD, gain_D, dy_TD if dtotal_TD is None else dtotal_TD, dx_TD, parts_PD, x_TD.shape[0],
            x_TD.stride(0), eps, JOINED=dtotal_TD is not None, STEPS=STEPS, **_sizes(x_TD),
        )  # fmt: skip
    return dx_TD, parts_PD


def _backward_shapes(
    dy_TD: Tensor, x_TD: Tensor, gain_D: Tensor, eps: float, dtotal_TD: Tensor | None
) -> Pair:
    rows = STEPS * _sizes(x_TD)["ROWS"]
    parts_PD = x_TD.new_empty((x_TD.shape[0] + rows - 1) // rows, x_TD.shape[1], dtype=torch.float32)
    return x_TD.new_empty(x_TD.shape), parts_PD


_rms_norm = opaque("rms_norm", "(Tensor x, Tensor gain, float eps) -> Tensor", _alone, _alone_shape)
_rms_norm_joined = opaque(
    "rms_norm_joined",
    "(Tensor x, Tensor gain, float eps, Tensor residual) -> (Tensor, Tensor)",
    _joined,
    _joined_shapes,
)
_rms_norm_backward = opaque(
    "rms_norm_backward",
    "(Tensor dy, Tensor x, Tensor gain, float eps, Tensor? dtotal) -> (Tensor, Tensor)",
    _backward,
    _backward_shapes,
)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x_TD, gain_D)
        ctx.eps = eps
        y_TD: Tensor = _rms_norm(x_TD, gain_D, eps)
        return y_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x_TD, gain_D = ctx.saved_tensors
        dx_TD, parts_PD = _rms_norm_backward(grads[0].contiguous(), x_TD, gain_D, ctx.eps, None)
        return dx_TD, parts_PD.sum(0).to(gain_D.dtype), None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, gain_D: Tensor, eps: float, residual_TD: Tensor) -> Pair:
        y_TD, total_TD = _rms_norm_joined(x_TD, gain_D, eps, residual_TD)
        ctx.save_for_backward(total_TD, gain_D)
        ctx.eps = eps
        return y_TD, total_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, Tensor]:
        dy_TD, dtotal_TD = (grad.contiguous() for grad in grads)
        total_TD, gain_D = ctx.saved_tensors
        dx_TD, parts_PD = _rms_norm_backward(dy_TD, total_TD, gain_D, ctx.eps, dtotal_TD)
        return dx_TD, parts_PD.sum(0).to(gain_D.dtype), None, dx_TD


def triton_rms_norm(x: Tensor, weight_D: Tensor, eps: float, residual: Tensor | None = None) -> Pair:
    """`rms_norm` in a pass each way; the gain's gradient is a sum of one part a program, in their order."""
    x_TD = x.reshape(-1, x.shape[-1])
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    if residual is None:
        y_TD: Tensor = _RMSNorm.apply(x_TD, weight_D, eps)  # type: ignore[no-untyped-call]
        return y_TD.view(x.shape), x
    residual_TD = residual.reshape(x_TD.shape).contiguous()
    y_TD, total_TD = _Joined.apply(x_TD, weight_D, eps, residual_TD)  # type: ignore[no-untyped-call]
    return y_TD.view(x.shape), total_TD.view(x.shape)


IMPLEMENTATIONS = (
    Implementation("rms_norm", EAGER, rms_norm, deterministic=(True, True), saves="x, rstd, x/rms"),
    Implementation(
        "rms_norm",
        "triton",
        triton_rms_norm,
        source="triton",
        deterministic=(True, True),
        saves="x",
        devices=frozenset({"cuda", "rocm"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    ),
)
