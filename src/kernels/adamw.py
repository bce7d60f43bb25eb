"""AdamW on one tensor, in place (OP-4): Decoupled Weight Decay Regularization (arXiv 1711.05101, alg. 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from src.kernels.declaration import EAGER, Implementation
from src.kernels.halves import join, keep

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


def adamw(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    copy: Tensor | None,
    decay: float,
    adam: Adam,
    low: Tensor | None = None,
) -> None:
    """Update parameter `p` and its moments `m`, `v` with the gradient `g`, by torch's fused step.

    Args:
        p: the parameter; with `low` its high half in bf16.
        g: gradient, perhaps of a narrower dtype than the parameter; not to be used afterwards.
        m: first moment, perhaps of a narrower dtype: the step is taken with the moment before its rounding.
        v: second moment, in the dtype of the parameter.
        copy: set to the new `p` in its own dtype, if given; not with `low`.
        decay: of the weights.
        adam: numbers that all tensors share.
        low: int16, the lower half of an fp32 parameter (`halves`), or None for one that is whole.
    """
    whole = p if low is None else join(p, low)
    g, first = g.to(whole.dtype), m.to(whole.dtype)
    if adam.clip is not None:
        g = g.mul_(adam.clip)
    torch_adamw(
        [whole], [g], [first], [v], [], [adam.step.clone()], fused=True, found_inf=adam.skip, amsgrad=False,
        beta1=adam.betas[0], beta2=adam.betas[1], lr=adam.lr, weight_decay=decay, eps=adam.eps,
        maximize=False,
    )  # fmt: skip
    if first is not m:
        m.copy_(first)
    if low is not None:
        keep(whole, p, low)
    if copy is not None:
        copy.copy_(p)


def triton_adamw(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    copy: Tensor | None,
    decay: float,
    adam: Adam,
    low: Tensor | None = None,
) -> None:
    """`adamw` in one pass.

    With fp32 masters and a gradient in bf16 it moves 28 bytes a parameter, where the library takes 40; 26 if
    the master is in halves, and 4 fewer if the first moment is in bf16.
    """
    from src.kernels.fused.adamw import adamw_kernel

    assert copy is None or low is None
    g, follower = g.contiguous(), copy if low is None else low
    assert all(t is None or t.is_contiguous() for t in (p, m, v, follower))
    beta1, beta2 = adam.betas
    adamw_kernel[((p.numel() + BLOCK - 1) // BLOCK,)](
        p if low is None else p.view(torch.int16), g, m, v, p if follower is None else follower, adam.step,
        p if adam.clip is None else adam.clip, adam.skip, p.numel(), adam.lr, decay, adam.eps, BETA1=beta1,
        BETA2=beta2, LOG_BETA1=math.log(beta1), LOG_BETA2=math.log(beta2), HAS_CLIP=adam.clip is not None,
        HAS_COPY=copy is not None, HAS_LOW=low is not None, BLOCK=BLOCK,
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
