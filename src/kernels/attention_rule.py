"""What the kernels of attention share: sinks added to one that knows none, and its autograd rule (OP-2).

A kernel gives o [B,S,H,U] and the log-sum-exp l [B,H,S] over the keys. A sink a joins the denominator
alone: l' = log(e^l + e^a), o' = o·exp(l - l'), and da = -Σ exp(a - l')·(do·o') (ATT-5). The backward of a
flash kernel computes its probabilities from whatever log-sum-exp it is given, so with (o', l') it gives dq,
dk and dv of the softmax with sinks; to rescale the output under autograd instead would lose the gradient of
l.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from src.kernels.dtypes import narrow, widen

Forward = Callable[..., Sequence[Tensor]]
"""(q, k, v, extra, scale, window) → o, l and what else the backward wants; no sinks."""
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""(do, q, k, v, o, l, extra, scale, window, *what else) → dq, dk, dv."""
Attention = Callable[..., tuple[Tensor, Tensor]]
"""(q, k, v, sinks, extra, scale, window) → o, l, with sinks; l has no gradient."""


_HEADS, _NUMBERS = "Tensor q, Tensor k, Tensor v", "Tensor? cu_seqlens, float scale, int? window"
FORWARD = f"({_HEADS}, {_NUMBERS}) -> (Tensor, Tensor)"
"""Schema of a `Forward` that is a custom operation."""
BACKWARD = f"(Tensor do, {_HEADS}, Tensor o, Tensor lse, {_NUMBERS}) -> (Tensor, Tensor, Tensor)"
"""Schema of a `Backward` that is one."""


def join_sinks(o_BSHU: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """o' and l' of o and l; o' in the dtype of o."""
    joined_BHS = torch.logaddexp(lse_BHS, widen(sinks_H)[:, None])
    kept_BSH1 = (lse_BHS - joined_BHS).exp().transpose(1, 2)[..., None]
    return narrow(o_BSHU * kept_BSH1, o_BSHU.dtype), joined_BHS


def sink_gradient(do_BSHU: Tensor, o_BSHU: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> Tensor:
    """da [H] from o' and l'."""
    pulled_BHS = (widen(do_BSHU) * widen(o_BSHU)).sum(-1).transpose(1, 2)
    share_BHS = (widen(sinks_H)[:, None] - lse_BHS).exp()
    return -(share_BHS * pulled_BHS).sum((0, 2)).to(sinks_H.dtype)


def differentiable(forward: Forward, backward: Backward) -> Attention:
    """Attention with sinks by a kernel without; `extra` is a tensor that it reads, such as a mask."""

    class WithSinks(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, extra: Tensor | None,
            scale: float, window: int | None,
        ) -> tuple[Tensor, Tensor]:  # fmt: skip
            o_BSHU, lse_BHS, *others = forward(q, k, v, extra, scale, window)
            if sinks_H is not None:
                o_BSHU, lse_BHS = join_sinks(o_BSHU, lse_BHS, sinks_H)
            ctx.save_for_backward(q, k, v, sinks_H, extra, o_BSHU, lse_BHS, *others)
            ctx.numbers = (scale, window)
            ctx.mark_non_differentiable(lse_BHS)
            return o_BSHU, lse_BHS

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            q, k, v, sinks_H, extra, o_BSHU, lse_BHS, *others = ctx.saved_tensors
            do_BSHU = grads[0]
            heads = backward(do_BSHU, q, k, v, o_BSHU, lse_BHS, extra, *ctx.numbers, *others)
            da_H = None if sinks_H is None else sink_gradient(do_BSHU, o_BSHU, lse_BHS, sinks_H)
            return *heads, da_H, None, None, None

    def attend(*arguments: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = WithSinks.apply(*arguments)  # type: ignore[no-untyped-call]
        return found

    return attend


def tokens(*heads: Tensor) -> tuple[Tensor, ...]:
    """[B,S,H,C] to [T,H,C], as kernels for packed samples take it; views of what is contiguous."""
    return tuple(x.flatten(0, 1) for x in heads)


def by_sample(lse_HT: Tensor, samples: int) -> Tensor:
    """[B,H,S] of what such a kernel gives; a view."""
    return lse_HT.view(lse_HT.shape[0], samples, -1).transpose(0, 1)


def by_token(lse_BHS: Tensor) -> Tensor:
    """[H,T], contiguous, as it wants that back."""
    return lse_BHS.transpose(0, 1).flatten(1).contiguous()


def results(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """New o and lse, laid out as a kernel leaves them."""
    samples, length, heads = q.shape[:3]
    o_BSHU = q.new_empty(samples, length, heads, v.shape[-1])
    if cu_seqlens is None:
        return o_BSHU, q.new_empty(samples, heads, length, dtype=torch.float32)
    return o_BSHU, by_sample(q.new_empty(heads, samples * length, dtype=torch.float32), samples)


def gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """New dq, dk and dv, contiguous."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def shaped_like(heads: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, of tokens or not, as `gradients` lays them out."""
    dq, dk, dv = (grad.view(x.shape).contiguous() for grad, x in zip(grads, heads, strict=True))
    return dq, dk, dv


def whole_blocks(widths: Mapping[str, int], dtype: torch.dtype) -> str | None:
    """The CUDA kernels read heads in blocks of 16 bytes."""
    bad = [f"{name} {widths[name]}" for name in ("key", "value") if widths.get(name, 0) * dtype.itemsize % 16]
    return f"needs head widths of a multiple of 16 bytes, which {', '.join(bad)} are not" if bad else None


def up_to_256(widths: Mapping[str, int], dtype: torch.dtype) -> str | None:
    """As `whole_blocks`, for kernels that hold a tile of heads on the chip."""
    bad = [f"{name} {widths[name]}" for name in ("key", "value") if widths.get(name, 0) > 256]
    return f"takes heads up to 256 wide, not {', '.join(bad)}" if bad else whole_blocks(widths, dtype)


def padded_values(widths: Mapping[str, int], dtype: torch.dtype) -> str | None:
    """For what pads the value heads to the width of the keys."""
    if widths.get("value", 0) > widths.get("key", 0):
        return "needs value heads no wider than key heads"
    return None
