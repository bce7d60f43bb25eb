"""Queries and keys of grouped-query attention: normed per head where a family does, then rotated (OP-11)."""

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
from src.kernels.rms_norm import rms_norm

TOKENS = 16
"""Tokens of a program of the backward kernel, which adds up their part of the gain's gradient."""

Pair = tuple[Tensor, Tensor]


def rotary_heads(
    turn: Callable[..., Tensor],
    q_BSHC: Tensor,
    k_BSGC: Tensor,
    cos_BSR: Tensor,
    sin_BSR: Tensor,
    gains: Pair | None = None,
    eps: float = 0.0,
) -> Pair:
    """Queries [B,S,H,C] and keys [B,S,G,C], their halves rotated against each other (ATT-2).

    `gains` are those of an RMS norm over each head of queries and of keys, [C] each, before the rotation
    (ATT-4); without them nothing is normed. `turn` is the rotation.
    """
    if gains is not None:
        q_BSHC, k_BSGC = rms_norm(q_BSHC, gains[0], eps)[0], rms_norm(k_BSGC, gains[1], eps)[0]
    q_BSHC = turn(q_BSHC, cos_BSR, sin_BSR, interleaved=False)
    return q_BSHC, turn(k_BSGC, cos_BSR, sin_BSR, interleaved=False)


def _forward(x_BSHC: Tensor, gain_C: Tensor | None, cos_BSR: Tensor, sin_BSR: Tensor, eps: float) -> Tensor:
    from src.kernels.fused.rotary_heads import rotate_kernel

    x_BSHC, out_BSHC = x_BSHC.contiguous(), _forward_shape(x_BSHC, gain_C, cos_BSR, sin_BSR, eps)
    tokens = x_BSHC.shape[0] * x_BSHC.shape[1]
    if tokens:
        rotate_kernel[(tokens,)](
            x_BSHC, out_BSHC, cos_BSR.contiguous(), sin_BSR.contiguous(),
            x_BSHC if gain_C is None else gain_C, eps, NORMED=gain_C is not None, **_sizes(x_BSHC),
        )  # fmt: skip
    return out_BSHC


def _forward_shape(
    x_BSHC: Tensor, gain_C: Tensor | None, cos_BSR: Tensor, sin_BSR: Tensor, eps: float
) -> Tensor:
    return x_BSHC.new_empty(x_BSHC.shape)


def _backward(
    dy_BSHC: Tensor, x_BSHC: Tensor, gain_C: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, eps: float
) -> Pair:
    from src.kernels.fused.rotary_heads import rotate_back_kernel

    dx_BSHC, parts_PC = _backward_shapes(dy_BSHC, x_BSHC, gain_C, cos_BSR, sin_BSR, eps)
    tokens = x_BSHC.shape[0] * x_BSHC.shape[1]
    if tokens:
        rotate_back_kernel[(parts_PC.shape[0],)](
            dy_BSHC.contiguous(), x_BSHC.contiguous(), dx_BSHC, cos_BSR.contiguous(), sin_BSR.contiguous(),
            gain_C, parts_PC, eps, tokens, TOKENS=TOKENS, **_sizes(x_BSHC),
        )  # fmt: skip
    return dx_BSHC, parts_PC


def _backward_shapes(
    dy_BSHC: Tensor, x_BSHC: Tensor, gain_C: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, eps: float
) -> Pair:
    programs = (x_BSHC.shape[0] * x_BSHC.shape[1] + TOKENS - 1) // TOKENS
    parts_PC = x_BSHC.new_empty(programs, x_BSHC.shape[-1], dtype=torch.float32)
    return dy_BSHC.new_empty(dy_BSHC.shape), parts_PC


def _sizes(x_BSHC: Tensor) -> dict[str, int]:
    """Constants of the kernels: heads and half a head's width, and the powers of two that hold them."""
    sizes = {"H": x_BSHC.shape[2], "HALF": x_BSHC.shape[3] // 2}
    return sizes | {f"BLOCK_{name}": power_of_two(size) for name, size in sizes.items()}


_rotate = opaque(
    "rotary_heads",
    "(Tensor x, Tensor? gain, Tensor cos, Tensor sin, float eps) -> Tensor",
    _forward,
    _forward_shape,
)
_rotate_back = opaque(
    "rotary_heads_backward",
    "(Tensor dy, Tensor x, Tensor gain, Tensor cos, Tensor sin, float eps) -> (Tensor, Tensor)",
    _backward,
    _backward_shapes,
)


class _Rotated(torch.autograd.Function):
    """A rotation alone keeps nothing but its angles: it turns back by their negatives."""

    @staticmethod
    def forward(
        ctx: Any, x_BSHC: Tensor, gain_C: Tensor | None, cos_BSR: Tensor, sin_BSR: Tensor, eps: float
    ) -> Tensor:
        ctx.save_for_backward(None if gain_C is None else x_BSHC, gain_C, cos_BSR, sin_BSR)
        ctx.eps = eps
        out_BSHC: Tensor = _rotate(x_BSHC, gain_C, cos_BSR, sin_BSR, eps)
        return out_BSHC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        x_BSHC, gain_C, cos_BSR, sin_BSR = ctx.saved_tensors
        if gain_C is None:
            return _rotate(grads[0], None, cos_BSR, -sin_BSR, 0.0), None, None, None, None
        dx_BSHC, parts_PC = _rotate_back(grads[0], x_BSHC, gain_C, cos_BSR, sin_BSR, ctx.eps)
        return dx_BSHC, parts_PC.sum(0).to(gain_C.dtype), None, None, None


def triton_rotary_heads(
    q_BSHC: Tensor,
    k_BSGC: Tensor,
    cos_BSR: Tensor,
    sin_BSR: Tensor,
    gains: Pair | None = None,
    eps: float = 0.0,
) -> Pair:
    """`rotary_heads` in one pass over queries and one over keys, and one back; the gains by partial sums."""
    q_gain, k_gain = (None, None) if gains is None else gains
    q: Tensor = _Rotated.apply(q_BSHC, q_gain, cos_BSR, sin_BSR, eps)  # type: ignore[no-untyped-call]
    k: Tensor = _Rotated.apply(k_BSGC, k_gain, cos_BSR, sin_BSR, eps)  # type: ignore[no-untyped-call]
    return q, k


IMPLEMENTATIONS = (
    Implementation(
        "rotary_heads",
        EAGER,
        partial(rotary_heads, rope.rope),
        deterministic=(True, True),
        saves="x, rstd, x/rms, cos, sin",
    ),
    Implementation(
        "rotary_heads",
        "real",
        partial(rotary_heads, rope.real_rope),
        deterministic=(True, True),
        saves="x, rstd, cos, sin",
    ),
    Implementation(
        "rotary_heads",
        "triton",
        triton_rotary_heads,
        source="triton",
        deterministic=(True, True),
        saves="x if normed, cos, sin",
        devices=frozenset({"cuda", "rocm"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    ),
)
