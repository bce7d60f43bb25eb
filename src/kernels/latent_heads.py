"""Queries, keys and values of latent attention from its projections (OP-11)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from src.kernels import rope
from src.kernels.blocks import power_of_two
from src.kernels.declaration import EAGER, Implementation
from src.kernels.opaque import opaque

Heads = tuple[Tensor, Tensor, Tensor]


def latent_heads(
    turn: Callable[..., Tensor],
    q_BSHC: Tensor,
    kv_BSHX: Tensor,
    k_BSR: Tensor,
    cos_BSR: Tensor,
    sin_BSR: Tensor,
) -> Heads:
    """Queries and keys [B,S,H,C], each [without rotation | rotated], and values [B,S,H,U].

    `kv_BSHX` holds a head's key without rotation beside its value; all heads share the rotated key `k_BSR`,
    as wide as twice `cos_BSR`. `turn` is the rotation (ATT-2). DeepSeek-V2 (arXiv 2405.04434, sec. 2.1.3).
    """
    nope = q_BSHC.shape[-1] - k_BSR.shape[-1]
    q_BSHN, q_BSHR = q_BSHC.tensor_split([nope], -1)
    k_BSHN, v_BSHU = kv_BSHX.tensor_split([nope], -1)
    k_BS1R = turn(k_BSR[:, :, None], cos_BSR, sin_BSR, interleaved=True)
    k_BSHC = torch.cat((k_BSHN, k_BS1R.expand(-1, -1, q_BSHC.shape[2], -1)), -1)
    return torch.cat((q_BSHN, turn(q_BSHR, cos_BSR, sin_BSR, interleaved=True)), -1), k_BSHC, v_BSHU


def _sizes(q_BSHC: Tensor, v_BSHU: Tensor, rope: int) -> dict[str, int]:
    """Constants of the kernels: widths, and the powers of two that hold them."""
    H, U = v_BSHU.shape[2:]
    widths = {"H": H, "NOPE": q_BSHC.shape[-1] - rope, "ROPE": rope, "VALUE": U}
    blocks = {"BLOCK_H": H, "BLOCK_N": widths["NOPE"], "BLOCK_P": rope // 2, "BLOCK_V": U}
    return widths | {name: power_of_two(size) for name, size in blocks.items()}


def _forward(q_BSHC: Tensor, kv_BSHX: Tensor, k_BSR: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> Heads:
    from src.kernels.fused.latent_heads import heads_kernel

    q, k, v = _forward_shapes(q_BSHC, kv_BSHX, k_BSR, cos_BSR, sin_BSR)
    k_TR = k_BSR.flatten(0, 1)
    if k_TR.shape[0]:
        heads_kernel[(k_TR.shape[0],)](
            q_BSHC.contiguous(), kv_BSHX.contiguous(), k_TR, k_TR.stride(0), cos_BSR.contiguous(),
            sin_BSR.contiguous(), q, k, v, **_sizes(q, v, k_TR.shape[1]),
        )  # fmt: skip
    return q, k, v


def _forward_shapes(
    q_BSHC: Tensor, kv_BSHX: Tensor, k_BSR: Tensor, cos_BSR: Tensor, sin_BSR: Tensor
) -> Heads:
    nope = q_BSHC.shape[-1] - k_BSR.shape[-1]
    value = (*kv_BSHX.shape[:3], kv_BSHX.shape[-1] - nope)
    return q_BSHC.new_empty(q_BSHC.shape), q_BSHC.new_empty(q_BSHC.shape), kv_BSHX.new_empty(value)


def _backward(dq_BSHC: Tensor, dk_BSHC: Tensor, dv_BSHU: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> Heads:
    from src.kernels.fused.latent_heads import heads_backward_kernel

    dq, dkv, dk_BSR = _backward_shapes(dq_BSHC, dk_BSHC, dv_BSHU, cos_BSR, sin_BSR)
    tokens = cos_BSR.shape[0] * cos_BSR.shape[1]
    if tokens:
        heads_backward_kernel[(tokens,)](
            dq_BSHC.contiguous(), dk_BSHC.contiguous(), dv_BSHU.contiguous(), cos_BSR.contiguous(),
            sin_BSR.contiguous(), dq, dkv, dk_BSR, **_sizes(dq, dv_BSHU, dk_BSR.shape[-1]),
        )  # fmt: skip
    return dq, dkv, dk_BSR


def _backward_shapes(
    dq_BSHC: Tensor, dk_BSHC: Tensor, dv_BSHU: Tensor, cos_BSR: Tensor, sin_BSR: Tensor
) -> Heads:
    rotated = 2 * cos_BSR.shape[-1]
    both = (*dv_BSHU.shape[:3], dq_BSHC.shape[-1] - rotated + dv_BSHU.shape[-1])
    dk_BSR = dk_BSHC.new_empty(*cos_BSR.shape[:2], rotated)
    return dq_BSHC.new_empty(dq_BSHC.shape), dv_BSHU.new_empty(both), dk_BSR


_TRIPLE = "-> (Tensor, Tensor, Tensor)"
_heads = opaque(
    "latent_heads",
    f"(Tensor q, Tensor kv, Tensor k, Tensor cos, Tensor sin) {_TRIPLE}",
    _forward,
    _forward_shapes,
)
_heads_backward = opaque(
    "latent_heads_backward",
    f"(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin) {_TRIPLE}",
    _backward,
    _backward_shapes,
)


class _LatentHeads(torch.autograd.Function):
    """A rotation keeps nothing but its angles."""

    @staticmethod
    def forward(
        ctx: Any, q_BSHC: Tensor, kv_BSHX: Tensor, k_BSR: Tensor, cos_BSR: Tensor, sin_BSR: Tensor
    ) -> Heads:
        ctx.save_for_backward(cos_BSR, sin_BSR)
        heads: Heads = _heads(q_BSHC, kv_BSHX, k_BSR, cos_BSR, sin_BSR)
        return heads

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        return *_heads_backward(*grads, *ctx.saved_tensors), None, None


def triton_latent_heads(
    q_BSHC: Tensor, kv_BSHX: Tensor, k_BSR: Tensor, cos_BSR: Tensor, sin_BSR: Tensor
) -> Heads:
    """`latent_heads` in one pass over what is read and written, and one back."""
    heads: Heads = _LatentHeads.apply(  # type: ignore[no-untyped-call]
        q_BSHC, kv_BSHX, k_BSR, cos_BSR, sin_BSR
    )
    return heads


IMPLEMENTATIONS = (
    Implementation(
        "latent_heads",
        EAGER,
        partial(latent_heads, rope.rope),
        deterministic=(True, True),
        saves="x, cos, sin",
    ),
    Implementation(
        "latent_heads",
        "real",
        partial(latent_heads, rope.real_rope),
        deterministic=(True, True),
        saves="cos, sin",
    ),
    Implementation(
        "latent_heads",
        "triton",
        triton_latent_heads,
        source="triton",
        deterministic=(True, True),
        saves="cos, sin",
        devices=frozenset({"cuda", "rocm"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    ),
)
