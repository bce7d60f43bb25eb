"""flash-attn-4, whose kernels for Hopper take everything that attention is asked for (OP-2).

Its own functions for autograd hide the backward from a compiler, so the two kernels are called below them
and wrapped as operations of ours. They give and take the log-sum-exp in natural logarithms, with the sinks
in it: [B,H,S], or [H,T] for packed samples. Names and arguments below the public ones change between its
betas, hence the narrow range of versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from src.kernels.attention_rule import by_sample, by_token, gradients, results, shaped_like, tokens, up_to_256
from src.kernels.declaration import Implementation
from src.kernels.opaque import opaque

LEAST = 64
"""Width of the narrowest heads."""


def flash_attn_4(
    q_BSHC: Tensor,
    k_BSGC: Tensor,
    v_BSGU: Tensor,
    scale: float,
    documents_BS: Tensor | None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention`; its backward is deterministic where torch's switch for deterministic algorithms is on."""
    assert documents_BS is None or cu_seqlens is not None, "packed samples come with cu_seqlens"
    found: tuple[Tensor, Tensor] = _FlashAttn4.apply(  # type: ignore[no-untyped-call]
        q_BSHC, k_BSGC, v_BSGU, sinks_H, cu_seqlens, scale, window
    )
    return found


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, cu_seqlens: Tensor | None, scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from flash_attn.cute.interface import _flash_attn_fwd

    samples, length = q.shape[:2]
    heads = (q, k, v) if cu_seqlens is None else tokens(q, k, v)
    o, lse, *_ = _flash_attn_fwd(
        *heads, learnable_sink=sinks_H, return_lse=True, **_places(cu_seqlens, length, scale, window)
    )
    o_BSHU = o.view(*q.shape[:3], v.shape[-1])
    return o_BSHU, lse if cu_seqlens is None else by_sample(lse, samples)


def _forward_shapes(
    q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, cu_seqlens: Tensor | None, scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return results(q, v, cu_seqlens)


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse_BHS: Tensor, sinks_H: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from flash_attn.cute.interface import _flash_attn_bwd

    tensors: tuple[Tensor, ...] = (q, k, v, o, do.contiguous())
    lse = lse_BHS.contiguous()
    if cu_seqlens is not None:
        tensors, lse = tokens(*tensors), by_token(lse_BHS)
    grads = _flash_attn_bwd(
        *tensors, lse, learnable_sink=sinks_H, deterministic=torch.are_deterministic_algorithms_enabled(),
        **_places(cu_seqlens, q.shape[1], scale, window),
    )  # fmt: skip
    da_H = q.new_empty(0) if sinks_H is None else grads[3]
    return *shaped_like((q, k, v), grads[:3]), da_H


def _backward_shapes(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse_BHS: Tensor, sinks_H: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    da_H = q.new_empty(0) if sinks_H is None else sinks_H.new_empty(sinks_H.shape)
    return *gradients(q, k, v), da_H


def _places(cu_seqlens: Tensor | None, length: int, scale: float, window: int | None) -> Mapping[str, Any]:
    """Which keys a query sees: `window_size_left` of them besides its own, None without bound."""
    asked: dict[str, Any] = {"softmax_scale": scale, "causal": True}
    asked["window_size_left"] = None if window is None else window - 1
    if cu_seqlens is not None:  # No document is longer than a sample: a bound that asks no device.
        asked |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        asked |= {"max_seqlen_q": length, "max_seqlen_k": length}
    return asked


_HEADS = "Tensor q, Tensor k, Tensor v"
_OTHERS = "Tensor? sinks, Tensor? cu_seqlens, float scale, int? window"
_attend = opaque("flash_attn_4", f"({_HEADS}, {_OTHERS}) -> (Tensor, Tensor)", _forward, _forward_shapes)
_attend_backward = opaque(
    "flash_attn_4_backward",
    f"(Tensor do, {_HEADS}, Tensor o, Tensor lse, {_OTHERS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_shapes,
)


class _FlashAttn4(torch.autograd.Function):
    """The kernels know the sinks, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, cu_seqlens: Tensor | None,
        scale: float, window: int | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        o_BSHU, lse_BHS = _attend(q, k, v, sinks_H, cu_seqlens, scale, window)
        ctx.save_for_backward(q, k, v, o_BSHU, lse_BHS, sinks_H, cu_seqlens)
        ctx.numbers = (scale, window)
        ctx.mark_non_differentiable(lse_BHS)
        return o_BSHU, lse_BHS

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, sinks_H, cu_seqlens = ctx.saved_tensors
        *heads, da_H = _attend_backward(grads[0], *tensors, sinks_H, cu_seqlens, *ctx.numbers)
        return *heads, da_H if sinks_H is not None else None, None, None, None


def _widths(widths: Mapping[str, int], dtype: torch.dtype) -> str | None:
    # Narrower heads compile for some needs and not for others, and heads of 16 had a wrong dq (LOG.md).
    bad = [f"{name} {widths[name]}" for name in ("key", "value") if widths.get(name, LEAST) < LEAST]
    return f"takes heads of {LEAST} and more, not {', '.join(bad)}" if bad else up_to_256(widths, dtype)


IMPLEMENTATIONS = (
    Implementation(
        "attention",
        "flash_attn_4",
        flash_attn_4,
        source="library",
        deterministic=(True, True),
        by_switch=True,
        saves="q, k, v, o, lse",
        devices=frozenset({"cuda"}),
        archs=frozenset({"sm90"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        features=frozenset({"packed", "unequal_widths", "gqa", "window", "sinks"}),
        apart=(frozenset({"gqa", "unequal_widths"}),),  # Its backward for Hopper says so.
        packages={"flash-attn-4": ">=4.0.0b36,<4.0.0b37"},
        shapes=_widths,
    ),
)
