"""Head and loss in one, without keeping the logits (OP-3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from src.kernels.chunk_rows import CHUNK_ROWS, FUSED_ROWS
from src.kernels.declaration import EAGER, Implementation
from src.kernels.dtypes import accumulate

IGNORE = -100
"""Label of a position without a target."""

SCALED = 2048
"""Elements of a program that scales."""
FUSED_BLOCK = 4096
"""Logits that a program of the kernel looks at together."""


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


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """As `_LinearCrossEntropy`: logits in the dtype of `h`, one kernel from them to loss and gradient."""

    @staticmethod
    def forward(ctx: Any, h_TD: Tensor, w_VD: Tensor, labels_T: Tensor, scale: Tensor, grad: bool) -> Tensor:
        T, V = h_TD.shape[0], w_VD.shape[0]
        loss_T = torch.empty(T, dtype=torch.float32, device=h_TD.device)
        dh_TD = torch.empty_like(h_TD)
        dw_VD = torch.empty(w_VD.shape, dtype=torch.float32, device=h_TD.device) if grad else None
        if dw_VD is not None and not T:
            dw_VD.zero_()
        buffer_CV = h_TD.new_empty(min(FUSED_ROWS, T), V)
        for start in range(0, T, FUSED_ROWS):
            rows = slice(start, start + FUSED_ROWS)
            logits_CV = buffer_CV[: h_TD[rows].shape[0]]
            torch.mm(h_TD[rows], w_VD.T, out=logits_CV)
            fused_losses(logits_CV, labels_T[rows], scale, loss_T[rows], grad)
            if dw_VD is not None:  # Now they are the gradient.
                torch.mm(logits_CV, w_VD, out=dh_TD[rows])
                _accumulate(dw_VD, logits_CV, h_TD[rows], is_first=start == 0)
        if dw_VD is not None:
            ctx.save_for_backward(dh_TD, dw_VD)
            ctx.dtype = w_VD.dtype
        return loss_T.sum() * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        dh_TD, dw_VD = ctx.saved_tensors
        return _scaled(dh_TD, grads[0], dh_TD.dtype), _scaled(dw_VD, grads[0], ctx.dtype), None, None, None


def fused_losses(logits_CV: Tensor, labels_C: Tensor, scale: Tensor, loss_C: Tensor, grad: bool) -> None:
    """Fill `loss_C`; with `grad`, put (softmax − one-hot)·scale in the place of the logits.

    On the meta device there is nothing to fill.
    """
    if logits_CV.is_meta:
        return
    from src.kernels.fused.cross_entropy import cross_entropy_kernel

    rows, V = logits_CV.shape
    cross_entropy_kernel[(rows,)](
        logits_CV, labels_C, scale, loss_C, logits_CV.stride(0), V=V, IGNORE=IGNORE, GRAD=grad,
        BLOCK=FUSED_BLOCK, num_warps=8,
    )  # fmt: skip


def _scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` times a scalar on the device, rounded once; torch's loop over two dtypes takes thrice that."""
    if x.is_meta:
        return torch.empty_like(x, dtype=dtype)
    from src.kernels.fused.cross_entropy import scaled_copy_kernel

    out = torch.empty_like(x, dtype=dtype)
    if x.numel():
        scaled_copy_kernel[((x.numel() + SCALED - 1) // SCALED,)](x, scale, out, x.numel(), BLOCK=SCALED)
    return out


def _accumulate(dw_VD: Tensor, dlogits_CV: Tensor, h_CD: Tensor, is_first: bool) -> None:
    """dw (+)= dlogitsᵀ·h in fp32; on CUDA the product itself adds, without a rounded copy in between."""
    if dw_VD.device.type == "cpu" or dlogits_CV.dtype == torch.float32:
        product = dlogits_CV.T @ h_CD
        dw_VD.copy_(product) if is_first else dw_VD.add_(product)
    elif is_first or dw_VD.is_meta:  # Torch 2.11 knows no shape of the sum.
        torch.mm(dlogits_CV.T, h_CD, out_dtype=torch.float32, out=dw_VD)
    else:
        torch.addmm(dw_VD, dlogits_CV.T, h_CD, out_dtype=torch.float32, out=dw_VD)


def triton_linear_cross_entropy(h_TD: Tensor, w_VD: Tensor, labels_T: Tensor, scale: Tensor) -> Tensor:
    """`linear_cross_entropy` with logits in the dtype of `h_TD`, rounded once before the softmax in fp32."""
    grad = torch.is_grad_enabled() and (h_TD.requires_grad or w_VD.requires_grad)
    loss: Tensor = _FusedLinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        h_TD, w_VD, labels_T, scale, grad
    )
    return loss


IMPLEMENTATIONS = (
    Implementation(
        "linear_cross_entropy", EAGER, linear_cross_entropy, deterministic=(True, True), saves="dh, dw"
    ),
    Implementation(
        "linear_cross_entropy",
        "triton",
        triton_linear_cross_entropy,
        source="triton",
        deterministic=(True, True),
        saves="dh, dw",
        devices=frozenset({"cuda", "rocm"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    ),
)
