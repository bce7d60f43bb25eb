"""Router logits in full precision (OP-9)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from src.kernels.declaration import EAGER, Implementation
from src.kernels.dtypes import widen
from src.kernels.opaque import opaque


def router_linear(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Logits [T,E] in fp32 at least, from wide copies of input and weight whatever the policy (MOD-4)."""
    return F.linear(widen(x_TD), widen(weight_ED))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """bf16 factors, fp32 sums and result."""
    return torch.mm(a, b, out_dtype=torch.float32)


def _product_shape(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)


_mm = opaque("mm_to_fp32", "(Tensor a, Tensor b) -> Tensor", _product, _product_shape)


def split(x: Tensor, terms: int) -> list[Tensor]:
    """bf16 tensors whose sum is `x`, 8 bits a term; three hold an fp32 number to about its last bit."""
    parts = []
    for _ in range(terms):
        parts.append(x.to(torch.bfloat16))
        x = x - parts[-1].to(x.dtype)
    return parts


class _SplitRouter(torch.autograd.Function):
    """Each fp32 factor as a sum of bf16 ones, all their products in one (OP-9)."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        terms = 1 if weight_ED.dtype == torch.bfloat16 else 3
        logits_TX = _mm(x_TD, torch.cat(split(weight_ED, terms)).T)
        return torch.stack(logits_TX.tensor_split(terms, 1)).sum(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x_TD, weight_ED = ctx.saved_tensors
        (w1, w2), (d1, d2, d3) = split(weight_ED.float(), 2), split(grads[0], 3)
        # What two terms of each leave out is below the rounding of dx to bf16.
        dx_TD = torch.cat((d1, d1, d2), 1) @ torch.cat((w1, w2, w1))
        dweight_XD = _mm(torch.cat((d1, d2, d3), 1).T, x_TD)
        return dx_TD, torch.stack(dweight_XD.tensor_split(3)).sum(0).to(weight_ED.dtype)


def split_router_linear(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """`router_linear` of a bf16 input, to fp32 rounding, on the units that multiply bf16."""
    logits_TE: Tensor = _SplitRouter.apply(x_TD, weight_ED)  # type: ignore[no-untyped-call]
    return logits_TE


IMPLEMENTATIONS = (
    Implementation("router_linear", EAGER, router_linear, deterministic=(True, True), saves="x, weight"),
    Implementation(
        "router_linear",
        "split",
        split_router_linear,
        deterministic=(True, True),
        saves="x, weight",
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16}),
    ),
)
