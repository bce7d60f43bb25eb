"""Attention over the positions of several ranks (ENG-21, ENG-22): the maths of the ring, for any attention.

Keys and values, or what they are made of, go once around the ring in the forward pass and once more in the
backward, with their gradients behind them. Letters: S queries of this rank, T keys of another, H and G heads,
C and U widths of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from src.kernels.block_attention import block_attention, block_attention_backward
from src.kernels.dtypes import accumulate, widen
from src.models.protocol import Tensors
from src.trainer.parallel.spans import Hop, hop, spans

if TYPE_CHECKING:
    from src.trainer.parallel.context import Arriving, Ring

Expand = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rule:
    """What the attention of a layer is, apart from its tensors."""

    ring: Ring
    expand: Expand | None
    """As in `protocol.Context`."""
    sent: int
    """How many tensors travel."""
    scale: float
    window: int | None

    def reaches(self, here: Hop) -> bool:
        """Whether the window lets any query see any key of this step."""
        return self.window is None or here.nearest < self.window

    def round(
        self, sent: Tensors, documents_BS: Tensor | None, length: int
    ) -> Iterator[tuple[Hop, Tensors, Tensor | None]]:
        """Of each step: who meets, what came of the keys' positions, and the ids of all documents there."""
        known = () if documents_BS is None else (documents_BS,)
        for step, came in enumerate(self.ring.around((*sent, *known))):
            here = hop(step, self.ring.size, self.ring.rank, length // 2)
            parts = tuple(x[:, here.keys] for x in came)
            yield here, parts[: self.sent], parts[-1] if known else None

    def keys_and_values(self, came: Tensors, weights: Tensors) -> tuple[Tensor, Tensor]:
        """[B,T,G,C] and [B,T,G,U]."""
        if self.expand is not None:
            return self.expand(*came, *weights)
        k_BTGC, v_BTGU = came
        return k_BTGC, v_BTGU

    def allowed(
        self, here: Hop, own_BS: Tensor | None, came_BT: Tensor | None, like_BSX: Tensor
    ) -> Tensor | None:
        """Which query sees which key, bool [B or 1,S,T]; None: each sees all. `like_BSX` gives the length."""
        allowed_BST = None
        if here.nearest == 0 or self.window is not None:
            back_1ST = self.distances(here, like_BSX.shape[1], like_BSX.device)[None]
            allowed_BST = back_1ST >= 0
            if self.window is not None:
                allowed_BST = allowed_BST & (back_1ST < self.window)
        if own_BS is not None and came_BT is not None:
            same_BST = own_BS[:, here.queries, None] == came_BT[:, None]
            allowed_BST = same_BST if allowed_BST is None else allowed_BST & same_BST
        return allowed_BST

    def distances(self, here: Hop, length: int, device: torch.device) -> Tensor:
        """How many places each query stands after each key in the sample, int64 [S,T]."""
        mine, theirs = (places(self.ring, rank, length, device) for rank in (self.ring.rank, here.source))
        return mine[here.queries, None] - theirs[here.keys]


def places(ring: Ring, rank: int, length: int, device: torch.device) -> Tensor:
    """Where in the sample the positions of a rank stand, int64 [S]; no document makes these restart."""
    both = spans(length * ring.size, ring.size, rank)
    return torch.cat([torch.arange(span.start, span.stop, device=device) for span in both])


class RingAttention(Function):
    """Behind `Ring.attend`. Keeps its inputs, its output and the log-sum-exp, nothing of other ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        rule: Rule,
        documents_BS: Tensor | None,
        sinks_H: Tensor | None,
        q_BSHC: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        sent, weights = tensors[: rule.sent], tensors[rule.sent :]
        merged = Merged()
        for here, came, ids_BT in rule.round(sent, documents_BS, q_BSHC.shape[1]):
            if rule.reaches(here):
                k_BTGC, v_BTGU = rule.keys_and_values(came, weights)
                allowed = rule.allowed(here, documents_BS, ids_BT, q_BSHC)
                part = block_attention(q_BSHC[:, here.queries], k_BTGC, v_BTGU, rule.scale, allowed)
                merged.add(here.queries, *part)
        wide_BSHU, lse_BHS = merged.with_sinks(sinks_H)
        o_BSHU = wide_BSHU.to(q_BSHC.dtype)
        ctx.rule = rule
        ctx.save_for_backward(documents_BS, sinks_H, q_BSHC, o_BSHU, lse_BHS, *tensors)
        return o_BSHU

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_BSHU: Tensor) -> tuple[Tensor | None, ...]:
        rule: Rule = ctx.rule
        documents_BS, sinks_H, q_BSHC, o_BSHU, lse_BHS, *tensors = ctx.saved_tensors
        sent, weights = tuple(tensors[: rule.sent]), tuple(tensors[rule.sent :])
        saved = Saved(q_BSHC, do_BSHU, lse_BHS, (widen(do_BSHU) * widen(o_BSHU)).sum(-1).transpose(1, 2))
        dq_BSHC, *dweights = (_wide_zeros(x) for x in (q_BSHC, *weights))
        behind = Behind(rule.ring, sent)
        for here, came, ids_BT in rule.round(sent, documents_BS, q_BSHC.shape[1]):
            behind.meet()
            if rule.reaches(here):
                allowed = rule.allowed(here, documents_BS, ids_BT, q_BSHC)
                part = gradients_of_hop(rule, saved.at(here.queries), came, weights, allowed)
                dq_BSHC[:, here.queries] += part.queries
                behind.add(here.keys, part.sent)
                for total, one in zip(dweights, part.weights, strict=True):
                    total += one
            behind.move()
        found = (dq_BSHC, *behind.meet(), *dweights)
        given = (x.to(like.dtype) for x, like in zip(found, (q_BSHC, *tensors), strict=True))
        return None, None, saved.of_sinks(sinks_H), *given


class Merged:
    """Attention over all keys that have come by so far, fp32 at least."""

    def __init__(self) -> None:
        self._o_BSHU = self._lse_BHS = torch.empty(0)

    def add(self, queries: slice, o_BSHU: Tensor, lse_BHS: Tensor) -> None:
        """Add what some queries found in further keys; the first keys are a rank's own, for all of them."""
        if not self._lse_BHS.numel():
            self._o_BSHU, self._lse_BHS = o_BSHU, lse_BHS
            return
        old_BSHU, old_BHS = self._o_BSHU[:, queries], self._lse_BHS[..., queries]
        share_BHS = torch.sigmoid(lse_BHS - old_BHS)
        old_BSHU += share_BHS.transpose(1, 2)[..., None] * (o_BSHU - old_BSHU)
        # Not softplus, of which torch's is exact to 1e-9 only.
        old_BHS.copy_(torch.logaddexp(old_BHS, lse_BHS))

    def with_sinks(self, sinks_H: Tensor | None) -> tuple[Tensor, Tensor]:
        """The result and its log-sum-exp once sinks have joined the denominator (ATT-5)."""
        if sinks_H is None:
            return self._o_BSHU, self._lse_BHS
        sinks_H1 = widen(sinks_H)[:, None]
        share_BHS = torch.sigmoid(self._lse_BHS - sinks_H1)
        o_BSHU = self._o_BSHU * share_BHS.transpose(1, 2)[..., None]
        return o_BSHU, torch.logaddexp(self._lse_BHS, sinks_H1)


@dataclass(frozen=True)
class Saved:
    """What backward knows of some queries."""

    q_BSHC: Tensor
    do_BSHU: Tensor
    lse_BHS: Tensor
    """Over all keys, and the sink."""
    delta_BHS: Tensor
    """Σ do·o of the final o."""

    def at(self, queries: slice) -> Saved:
        """The same of a part of them."""
        by_place = (x[:, queries] for x in (self.q_BSHC, self.do_BSHU))
        return Saved(*by_place, *(x[..., queries] for x in (self.lse_BHS, self.delta_BHS)))

    def of_sinks(self, sinks_H: Tensor | None) -> Tensor | None:
        """The sinks' gradient: -Σ exp(a - lse)·Σ do·o (ATT-5)."""
        if sinks_H is None:
            return None
        shares_BHS = torch.exp(widen(sinks_H)[:, None] - self.lse_BHS)
        return -(shares_BHS * self.delta_BHS).sum((0, 2)).to(sinks_H.dtype)


@dataclass(frozen=True)
class Gradients:
    """What one step of the ring adds to gradients."""

    queries: Tensor
    sent: Tensors
    weights: Tensors


def gradients_of_hop(
    rule: Rule, saved: Saved, came: Tensors, weights: Tensors, allowed_BST: Tensor | None
) -> Gradients:
    """Gradients through the keys that are here; those of `came` are for the rank that they came from."""
    leaves = tuple(x.detach().requires_grad_() for x in (*came, *weights))
    with torch.enable_grad():
        k_BTGC, v_BTGU = rule.keys_and_values(leaves[: rule.sent], leaves[rule.sent :])
    dq_BSHC, dk_BTGC, dv_BTGU = block_attention_backward(
        saved.do_BSHU, saved.delta_BHS, saved.q_BSHC, k_BTGC.detach(), v_BTGU.detach(),
        saved.lse_BHS, rule.scale, allowed_BST,
    )  # fmt: skip
    if rule.expand is None:
        return Gradients(dq_BSHC, (dk_BTGC, dv_BTGU), ())
    outer = (dk_BTGC.to(k_BTGC.dtype), dv_BTGU.to(v_BTGU.dtype))
    found = torch.autograd.grad((k_BTGC, v_BTGU), leaves, outer)
    return Gradients(dq_BSHC, found[: rule.sent], found[rule.sent :])


class Behind:
    """The gradients of what travels, fp32 at least, which follow it from rank to rank and come home."""

    def __init__(self, ring: Ring, sent: Tensors) -> None:
        self._ring = ring
        self._here = tuple(_wide_zeros(x) for x in sent)
        self._arriving: Arriving | None = None

    def meet(self) -> Tensors:
        """The gradients of what is here now; in the end those of this rank's own."""
        if self._arriving is not None:
            self._here = self._arriving.wait()
        return self._here

    def add(self, keys: slice, parts: Tensors) -> None:
        """Add to those of some positions."""
        for total, part in zip(self._here, parts, strict=True):
            total[:, keys] += part

    def move(self) -> None:
        """Send them after what they belong to."""
        self._arriving = self._ring.pass_on(self._here)


def _wide_zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=accumulate(x.dtype))
