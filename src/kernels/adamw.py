"""AdamW on one tensor, in place (OP-4): Decoupled Weight Decay Regularization (arXiv 1711.05101, alg. 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from src.kernels.declaration import EAGER, Implementation

BLOCK = 1024


@dataclass(frozen=True)
class Adam:
    """What one update of every tensor shares; the tensors are scalars on the device."""

    lr: float
    betas: tuple[float, float]
    eps: float
    step: Tensor
    """fp32, updates applied before this one."""
    clip: Tensor | None
    """Factor on gradients."""
    skip: Tensor
    """fp32, 1 leaves everything as it is, else 0."""


def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, copy: Tensor | None, decay: float, adam: Adam) -> None:
    """Update parameter `p` and its moments `m`, `v` with the gradient `g`, by torch's fused step.

    `g` may be of a narrower dtype than `p`, and is not to be used afterwards. `copy`, if given, is set to
    the new `p` in its own dtype.
    """
    g = g.to(p.dtype)
    if adam.clip is not None:
        g = g.mul_(adam.clip)
    torch_adamw(
        [p], [g], [m], [v], [], [adam.step.clone()], fused=True, found_inf=adam.skip, amsgrad=False,
        beta1=adam.betas[0], beta2=adam.betas[1], lr=adam.lr, weight_decay=decay, eps=adam.eps,
        maximize=False,
    )  # fmt: skip
    if copy is not None:
        copy.copy_(p)


def triton_adamw(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, copy: Tensor | None, decay: float, adam: Adam
) -> None:
    """`adamw` in one pass: 28 bytes a parameter with fp32 masters, where the library takes 40."""
    from src.kernels.fused.adamw import adamw_kernel

    g = g.contiguous()
    assert all(t.is_contiguous() for t in (p, m, v))
    beta1, beta2 = adam.betas
    adamw_kernel[((p.numel() + BLOCK - 1) // BLOCK,)](
        p, g, m, v, p if copy is None else copy, adam.step, p if adam.clip is None else adam.clip, adam.skip,
        p.numel(), adam.lr, decay, adam.eps, BETA1=beta1, BETA2=beta2, LOG_BETA1=math.log(beta1),
        LOG_BETA2=math.log(beta2), HAS_CLIP=adam.clip is not None, HAS_COPY=copy is not None, BLOCK=BLOCK,
    )  # fmt: skip


IMPLEMENTATIONS = (
    Implementation("adamw", EAGER, adamw, deterministic=(True, True), saves="nothing"),
    Implementation(
        "adamw",
        "triton",
        triton_adamw,
        source="triton",
        deterministic=(True, True),
        saves="nothing",
        devices=frozenset({"cuda", "rocm"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    ),
)
