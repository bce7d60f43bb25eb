"""What a decoder layer hands to the engine and back: the five-stage protocol (ENG-10).

A layer is cut where communication happens: 1 attention and routing, 2 dispatch, 3 experts, 4 combine,
5 aggregate. A family implements 1, 3 and 5; the engine owns 2 and 4. Letters: T tokens of a micro-batch
(batch times sequence, flattened), D model width, E experts, K top-k, R rows, B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from src.kernels.sort_by_expert import Order


@dataclass(frozen=True)
class Routing:
    """Which experts a token visits and with what weight."""

    ids_TK: Tensor
    """int32, K distinct expert ids of each token."""
    weights_TK: Tensor
    """fp32 (fp64 in an fp64 model), differentiable."""


@dataclass(frozen=True)
class Carry:
    """What stage 1 keeps for stage 5."""

    residual_TD: Tensor
    """Residual stream after attention, the shared expert's output added."""


class Balance(Protocol):
    """The engine's side of one layer's routing: auxiliary losses and load counts (ENG-24).

    It knows the layer by its tensors alone: a number would compile every layer anew (CMP-4).
    """

    def apply(self, logits_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return `weights_TK` unchanged in value; its gradient also carries that of the auxiliary terms.

        `scores_TE` sum to 1 over all experts, before group masks and bias; `logits_TE` are the router's.
        Counts of real tokens are added to the engine's own counters.
        """
        ...

    def again(self) -> Balance:
        """The hook for a second forward of the same tokens: the same gradients, nothing counted (ENG-26)."""
        ...


class Balances(Protocol):
    """The balance of a micro-batch, layer by layer."""

    def at(self, layer: int) -> Balance:
        """The hook of the layer with this global index."""
        ...

    def forced(self, layer: int) -> Tensor | None:
        """int32 experts [T,K] that the layer is to use whatever its router says; None lets it choose."""
        ...


Tensors = tuple[Tensor, ...]


class Context(Protocol):
    """The engine's attention over sequences of which this rank has a part of the positions (ENG-21)."""

    def attend(
        self,
        q_BSHC: Tensor,
        sent: Tensors,
        expand: Callable[..., tuple[Tensor, Tensor]] | None,
        weights: Tensors,
        scale: float,
        documents_BS: Tensor | None,
        window: int | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of this rank's queries to the keys of all ranks, [B,S,H,U].

        Args:
            q_BSHC: queries of the S positions here; window and causality go by their places in the sample.
            sent: what travels between the ranks, each [B,S,…]: as `expand` takes it, else keys and values.
            expand: (*sent, *weights) → keys [B,S,G,C] and values [B,S,G,U], position by position; it must use
                no other tensor that requires a gradient. None: keys and values travel themselves.
            weights: parameters that `expand` uses.
            scale: factor on the scores.
            documents_BS: as in `Batch`.
            window: a query sees so many keys, its own included; None: all before it.
            sinks_H: a logit per head that joins the denominator of the softmax.
        """
        ...


@dataclass(frozen=True)
class Batch:
    """Everything a layer may know about the tokens of one micro-batch."""

    positions_BS: Tensor
    """int64, restarting at 0 in each document (PACK-6)."""
    cu_seqlens: Tensor | None
    """int32 starts of the segments of the flattened [B*S] tokens, first 0, last B*S, those of samples among
    them; None: every sample is one full document, and attention takes the dense path, or a context has cut
    the segments."""
    documents_BS: Tensor | None
    """int32 index of the segment that a position belongs to, unique within the micro-batch and never falling;
    None: every sample is one full document."""
    real_BS: Tensor | None
    """bool, False on pads; None: every token is real."""
    balances: Balances | None
    """The engine's hooks into routers; None routes without auxiliary terms or counts."""
    balance: Balance | None = None
    """That of the layer which gets the batch, from `at`."""
    ids_TK: Tensor | None = None
    """The experts that this layer uses, forced ones or those of an earlier forward; None lets it choose."""
    context: Context | None = None
    """Attention where S is a part of the sequence; None: all positions are here."""

    def at(self, layer: int) -> Batch:
        """The same batch as the layer with this global index sees it; dense layers need not ask."""
        if self.balances is None:
            return self
        return replace(self, balance=self.balances.at(layer), ids_TK=self.balances.forced(layer))

    def again(self, ids_TK: Tensor | None) -> Batch:
        """The batch for a second forward of a layer, whose router chose `ids_TK` in the first."""
        balance = None if self.balance is None else self.balance.again()
        return replace(self, balance=balance, ids_TK=ids_TK)


class Layer(Protocol):
    """A decoder layer of any family."""

    is_moe: bool
    is_fused: bool
    """Whether `local` stands in for stages 2 to 5 where it can."""

    def attend(self, hidden_TD: Tensor, batch: Batch) -> tuple[Tensor, Routing | None, Carry]:
        """Stage 1: tokens [T,D] for the experts (or the dense FFN), routing (None if dense), the carry."""
        ...

    def experts(self, rows_RD: Tensor, counts_E: Tensor | None) -> Tensor:
        """Stage 3: rows grouped by local expert with int32 counts [E/ep]; a dense layer gets None."""
        ...

    def aggregate(
        self, rows: Tensor, routing: Routing | None, carry: Carry, home_TK: Tensor | None = None
    ) -> Tensor:
        """Stage 5: hidden [T,D] = residual + sum over k of weight·row.

        Rows are [T·K,D] as they came home, and `home_TK` says which is whose (`Dispatcher.home`); of a dense
        layer they are [T,D].
        """
        ...

    def local(self, tokens_TD: Tensor, routing: Routing, carry: Carry, order: Order) -> Tensor:
        """Stages 2 to 5 as one operation, where all experts are here."""
        ...


class Dispatcher(Protocol):
    """Stages 2 and 4."""

    returns: bool
    """Whether rows come back from elsewhere; if not they are home, and stage 4 may be left out."""

    def order(self, ids_TK: Tensor) -> Order | None:
        """The order of the rows by expert where all experts are here; None where rows travel."""
        ...

    def dispatch(self, tokens_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor, object]:
        """Rows [R,D] ordered by (local expert, source rank, token), int32 counts [E/ep], an opaque plan."""
        ...

    def dispatch_again(self, tokens_TD: Tensor, plan: object) -> Tensor:
        """The rows of a dispatch done before, without planning and without a look at the device (ENG-18)."""
        ...

    def combine(self, rows_RD: Tensor, plan: object) -> Tensor:
        """Rows [T·K,D] back at the rank that owns the token, in an order of the dispatcher's own."""
        ...

    def home(self, plan: object) -> Tensor:
        """Which of those rows is that of each token's k-th expert, [T,K]."""
        ...


def run_layer(layer: Layer, hidden_TD: Tensor, batch: Batch, dispatcher: Dispatcher) -> Tensor:
    """The five stages back to back, or the last four as one operation, under plain autograd."""
    tokens_TD, routing, carry = layer.attend(hidden_TD, batch)
    if routing is None:
        return layer.aggregate(layer.experts(tokens_TD, None), None, carry)
    order = dispatcher.order(routing.ids_TK) if layer.is_fused else None
    if order is not None:
        return layer.local(tokens_TD, routing, carry, order)
    rows_RD, counts_E, plan = dispatcher.dispatch(tokens_TD, routing.ids_TK)
    rows_ND = dispatcher.combine(layer.experts(rows_RD, counts_E), plan)
    return layer.aggregate(rows_ND, routing, carry, dispatcher.home(plan))


__all__ = ["Balance", "Balances", "Batch", "Carry", "Context", "Dispatcher", "Layer", "Routing", "run_layer"]
