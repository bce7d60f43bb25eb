"""Head and loss in one, without keeping the logits (OP-3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from src.kernels.declaration import EAGER, Implementation
from src.kernels.dtypes import accumulate

IGNORE = -100
"""Label of a position without a target."""

CHUNK_ROWS = 256
"""Rows whose logits exist at one time, in one buffer. A larger one goes back to the system and comes zeroed
anew each time, which on CPU cost as much again as the products (512 rows of 8,192)."""


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients are made in the forward pass, where the logits are; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, h_TD: Tensor, w_VD: Tensor, labels_T: Tensor, scale: Tensor, grad: bool) -> Tensor:
        wide = accumulate(h_TD.dtype)
        w_wide = w_VD.to(wide)
        loss = torch.zeros((), dtype=wide, device=h_TD.device)
        dh_TD, dw_VD = torch.empty_like(h_TD), torch.zeros_like(w_wide) if grad else None
        buffer = w_wide.new_empty(min(CHUNK_ROWS, h_TD.shape[0]), w_VD.shape[0])
        for start in range(0, h_TD.shape[0], CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            h_CD, labels_C1 = h_TD[rows].to(wide), labels_T[rows, None]
            is_target_C1, label_C1 = labels_C1 != IGNORE, labels_C1.clamp(min=0)
            exp_CV = buffer[: h_CD.shape[0]]
            nll_C1, total_C1 = _exponentials(h_CD, w_wide, label_C1, exp_CV)
            loss = loss + nll_C1.masked_fill(~is_target_C1, 0.0).sum()
            if dw_VD is not None:
                exp_CV.scatter_add_(1, label_C1, -total_C1)  # Divided by the total: softmax − one-hot.
                # The factors go onto [C,D], not over the V columns once more.
                factor_C1 = is_target_C1 * scale / total_C1
                dh_TD[rows] = (exp_CV @ w_wide) * factor_C1
                dw_VD.addmm_(exp_CV.T, h_CD * factor_C1)
        if dw_VD is not None:
            ctx.save_for_backward(dh_TD, dw_VD.to(w_VD.dtype))
        return loss * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        dh_TD, dw_VD = ctx.saved_tensors
        return dh_TD * grads[0], dw_VD * grads[0], None, None, None


def _exponentials(h_CD: Tensor, w_VD: Tensor, label_C1: Tensor, out_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Fill `out_CV` with exp(logit − row's largest); return −log softmax at the label, and each row's sum."""
    torch.mm(h_CD, w_VD.T, out=out_CV)
    out_CV.sub_(out_CV.amax(1, keepdim=True))
    picked_C1 = out_CV.gather(1, label_C1)
    total_C1 = out_CV.exp_().sum(1, keepdim=True)
    return total_C1.log() - picked_C1, total_C1


def linear_cross_entropy(h_TD: Tensor, w_VD: Tensor, labels_T: Tensor, scale: Tensor) -> Tensor:
    """scale·Σ −log softmax(h·wᵀ)[label] over the labels that are not −100; a scalar, fp32 at least.

    `labels_T` int64; `scale` a scalar tensor on the device, 1 / global target tokens in training. Under
    `no_grad` no gradient is computed. The idea is that of Liger's fused linear cross-entropy
    (arXiv 2410.10989, sec. 3.2).
    """
    grad = torch.is_grad_enabled() and (h_TD.requires_grad or w_VD.requires_grad)
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        h_TD, w_VD, labels_T, scale, grad
    )
    return loss


IMPLEMENTATIONS = (
    Implementation(
        "linear_cross_entropy", EAGER, linear_cross_entropy, deterministic=(True, True), saves="dh, dw"
    ),
)
