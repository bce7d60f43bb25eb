"""Auxiliary losses, z-loss and load counts, weighted by the same global token count as the loss (ENG-24).

Over the real tokens of a unit j: f_i = rows to expert i / (K · tokens), P_i = mean score of i, and A_j is
E · Σ f_i P_i (Switch Transformer, arXiv 2101.03961, eq. 4, for K experts), so even routing gives 1. A MoE
layer adds Σ_j (n_j / N_tok) · A_j, n_j being the labels of the unit: its strength depends neither on the mesh
nor on the number of micro-batches. Letters: U units, T tokens, E experts, K top-k, M MoE layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from src.config import BalanceConfig
from src.trainer.data.batch import MicroBatch
from src.trainer.parallel.context import Ring
from src.trainer.parallel.force import Force, token_numbers
from src.trainer.parallel.inputs import whole_labels, whole_tokens

AUXILIARY = ("sequence", "micro_batch", "global_batch_lagged")
"""Kinds of balance that add a term to the loss."""


@dataclass
class Tally:
    """What a step has gathered so far; local parts whose SUM over all ranks is the global value."""

    aux: Tensor
    """Σ over MoE layers and units of (n_j/N_tok)·A_j, without coefficient; [1], since torch 2.13 drops what a
    compiled graph writes to an fp64 scalar on a CPU."""
    z: Tensor
    """The same of mean squared logsumexp."""
    counts_ME: Tensor
    """int64 rows per expert, [M,E]; zero in layers of other stages."""


class Balancer:
    """Balance of one rank: the state that outlives a step, and the tally of the current one."""

    def __init__(
        self,
        config: BalanceConfig,
        moe_layers: list[int],
        experts: int,
        device: torch.device,
        dtype: torch.dtype,
        ring: Ring | None = None,
        force: Force | None = None,
    ) -> None:
        """`ring` holds the ranks that share samples; `force` chooses in the routers' place."""
        self._config, self._ring, self._force = config, ring, force
        self._row = {layer: row for row, layer in enumerate(moe_layers)}
        self._dtype, self._device, self._experts = dtype, device, experts
        self.lagged_ME = torch.full(
            (len(moe_layers), experts), 1 / max(1, experts), dtype=dtype, device=device
        )
        """f of the last completed step over the global batch, at first 1/E."""
        self.tally = self.start()

    def start(self) -> Tally:
        """A fresh tally, for a new step."""
        zero = torch.zeros(1, dtype=self._dtype, device=self._device)
        counts_ME = torch.zeros(len(self._row), self._experts, dtype=torch.int64, device=self._device)
        self.tally = Tally(zero, zero.clone(), counts_ME)
        return self.tally

    def bind(self, batch: MicroBatch, n_tokens: Tensor) -> BoundBalance:
        """The hooks for one micro-batch; `n_tokens` is the number of labels of the global batch."""
        numbers_T = None if self._force is None else token_numbers(batch, self._ring)
        return BoundBalance(self, Unit(batch, n_tokens, self._dtype), self._force, numbers_T)

    def at(self, layer: int, unit: Unit) -> LayerBalance:
        """The hook of one layer for one micro-batch."""
        row = self._row[layer]
        mine = Tally(self.tally.aux, self.tally.z, self.tally.counts_ME[row])
        return LayerBalance(self._config, unit, mine, self.lagged_ME[row], self._ring)

    def finish(self, counts_ME: Tensor, skip: Tensor) -> None:
        """Take the step's counts, summed over all data ranks, as the next step's f, unless it was skipped."""
        new_ME = counts_ME.to(self._dtype) / counts_ME.sum(1, keepdim=True).clamp(min=1)
        self.lagged_ME = torch.where(skip > 0, self.lagged_ME, new_ME)


@dataclass(frozen=True)
class BoundBalance:
    """The routers' hooks for one micro-batch (`protocol.Balances`)."""

    balancer: Balancer
    unit: Unit
    force: Force | None
    numbers_T: Tensor | None
    """Number of each token in the whole training, for `force`."""

    def at(self, layer: int) -> LayerBalance:
        """The hook of the layer with this global index."""
        return self.balancer.at(layer, self.unit)

    def forced(self, layer: int) -> Tensor | None:
        """The experts that `balance.force` gives the tokens of this layer."""
        if self.force is None:
            return None
        assert self.numbers_T is not None
        return self.force.ids(layer, self.numbers_T)


@dataclass(frozen=True)
class LayerBalance:
    """The router's hook of one layer for one micro-batch (`protocol.Balance`); part of compiled layers."""

    config: BalanceConfig
    unit: Unit
    tally: Tally
    """The step's; `counts_ME` is the row of this layer, [E]."""
    lagged_E: Tensor
    """f of this layer in the last completed step."""
    ring: Ring | None
    """The ranks that share samples: f counts the rows of all, P is a rank's own share."""

    def again(self) -> LayerBalance:
        """The same hook, whose counts nobody reads."""
        unread = Tally(*(torch.zeros_like(t) for t in (self.tally.aux, self.tally.z, self.tally.counts_ME)))
        return replace(self, tally=unread)

    def apply(self, logits_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """`weights_TK`, whose backward also feeds gradient 1 to the layer's auxiliary term."""
        term = self.add(logits_TE, scores_TE, ids_TK)
        if term is None or not term.requires_grad:
            return weights_TK
        attached: Tensor = Attach.apply(weights_TK, term)  # type: ignore[no-untyped-call]
        return attached

    def add(self, logits_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor) -> Tensor | None:
        """Add this layer's values to the tally; return the term of the loss, or None if there is none."""
        routed_UE = self.unit.routed(ids_TK, scores_TE.shape[1])
        self.tally.counts_ME.add_(routed_UE.sum(0))
        term = None
        if self.config.kind in AUXILIARY:
            aux = self.auxiliary(scores_TE, routed_UE, ids_TK.shape[1])
            self.tally.aux.add_(aux.detach())
            term = self.config.coef * aux if self.config.coef else None
        if self.config.z_loss:
            z = self.unit.mean_over_tokens(torch.logsumexp(logits_TE, -1).square())
            self.tally.z.add_(z.detach())
            term = self.config.z_loss * z if term is None else term + self.config.z_loss * z
        return term

    def auxiliary(self, scores_TE: Tensor, routed_UE: Tensor, top_k: int) -> Tensor:
        """Σ_j (n_j/N_tok)·A_j over the units of a micro-batch."""
        by_sequence = self.config.kind == "sequence"
        scores_UE, tokens_U1 = self.unit.sums(scores_TE, by_sequence)
        if self.config.kind == "global_batch_lagged":
            share_UE = self.lagged_E[None]
        else:
            routed_UE = routed_UE if by_sequence else routed_UE.sum(0, keepdim=True)
            if self.ring is not None:
                routed_UE = self.ring.sum(routed_UE.clone())
            share_UE = routed_UE.to(scores_TE.dtype) / (top_k * tokens_U1)
        balance_U = scores_TE.shape[1] * (share_UE * scores_UE / tokens_U1).sum(1)
        return (self.unit.weights(by_sequence) * balance_U).sum()


class Unit:
    """The tokens of one micro-batch, as units that auxiliary terms are means over."""

    def __init__(self, batch: MicroBatch, n_tokens: Tensor, dtype: torch.dtype) -> None:
        self._samples = batch.ids_BS.shape[0]
        self._real_BS = batch.real_BS
        self._labels_B, self._tokens_B = whole_labels(batch), whole_tokens(batch)
        self._n_tokens = n_tokens
        self._dtype = dtype

    def routed(self, ids_TK: Tensor, experts: int) -> Tensor:
        """int64 rows of real tokens per sample and expert [B,E]."""
        ids_BN = ids_TK.long().view(self._samples, -1)
        ones_BN = torch.ones_like(ids_BN)
        if self._real_BS is not None:
            ones_BN = self._real_BS.to(ones_BN.dtype).repeat_interleave(ids_TK.shape[1], 1)
        counts_BE = torch.zeros(self._samples, experts, dtype=torch.int64, device=ids_TK.device)
        return counts_BE.scatter_add_(1, ids_BN, ones_BN)

    def sums(self, scores_TE: Tensor, by_sequence: bool) -> tuple[Tensor, Tensor]:
        """Sum of scores over the real tokens of each unit [U,E], and how many those are [U,1], at least 1.

        Of samples that lie on several ranks the sum is over the tokens here, and the number is that of all.
        """
        scores_BSE = scores_TE.view(self._samples, -1, scores_TE.shape[1])
        if self._real_BS is not None:
            scores_BSE = torch.where(self._real_BS[..., None], scores_BSE, 0)
        scores_BE, tokens_B = scores_BSE.sum(1), self._tokens_B
        if not by_sequence:
            scores_BE, tokens_B = scores_BE.sum(0, keepdim=True), tokens_B.sum(0, keepdim=True)
        return scores_BE, tokens_B.clamp(min=1)[:, None]

    def weights(self, by_sequence: bool) -> Tensor:
        """n_j / N_tok of each unit [U]."""
        labels_U = self._labels_B if by_sequence else self._labels_B.sum(0, keepdim=True)
        return labels_U.to(self._dtype) / self._n_tokens

    def mean_over_tokens(self, values_T: Tensor) -> Tensor:
        """n/N_tok times the mean over the real tokens of the micro-batch."""
        sums_11, tokens_11 = self.sums(values_T[:, None], by_sequence=False)
        return (self.weights(by_sequence=False) * (sums_11 / tokens_11)[:, 0]).sum()


class Attach(Function):
    """Weights, unchanged; in backward the term of the loss receives gradient 1 once."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, term: Tensor) -> Tensor:
        ctx.like = (term.dtype, term.device)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.like
        return grad, torch.ones((), dtype=dtype, device=device)
