"""The product of a projection; an operation so that the engine can put its weight gradient off (ENG-15)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from src.kernels.declaration import EAGER, Implementation
from src.kernels.later import Later


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, later: Later | None = None) -> Tensor:
    """x·Wᵀ + b for x [..., in], weight [out, in], bias [out]; `later` may take over the weight's gradient."""
    if later is None:
        return F.linear(x, weight, bias)
    out: Tensor = _Linear.apply(x, weight, bias, later)  # type: ignore[no-untyped-call]
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: Later) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later, ctx.has_bias = later, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dy = grads[0]

        def product() -> Tensor:
            dw: Tensor = dy.flatten(0, -2).T @ x.flatten(0, -2)
            return dw

        dw = None if ctx.later(weight, product) else product()
        return dy @ weight, dw, dy.flatten(0, -2).sum(0) if ctx.has_bias else None, None


IMPLEMENTATIONS = (Implementation("linear", EAGER, linear, deterministic=(True, True), saves="x"),)
