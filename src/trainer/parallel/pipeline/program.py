"""What a rank computes of a step, micro-batch by micro-batch and stage by stage, under plain autograd.

An executor says in which order; a program knows the model, and nothing of ranks or schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from src.models.build import CausalLM, Stage
from src.models.protocol import Context, Dispatcher
from src.trainer.data.batch import MicroBatch
from src.trainer.parallel.balance import Balancer
from src.trainer.parallel.inputs import model_batch
from src.trainer.ranges import Ranges


class Program(Protocol):
    """One rank's computations; `stage` is the number of a stage of the whole pipeline."""

    def forward(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        """What the stage sends on, [B,S,D], or the micro-batch's part of the loss on the last stage.

        `received` is what the stage before sent on, None on the first. The result has no graph.
        """
        ...

    def backward(self, stage: int, micro_batch: int, gradient: Tensor | None, defer: bool) -> Tensor | None:
        """Back through a forward, once; the gradient of what was received, None on the first stage.

        `gradient` is that of what was sent on, None on the last stage. With `defer`, weight gradients of
        projections and experts wait for `weights`.
        """
        ...

    def weights(self, stage: int, micro_batch: int) -> None:
        """The weight gradients that a backward left over."""
        ...


class Work:
    """The micro-batches of one step and what their forwards gather."""

    def __init__(
        self,
        batches: Sequence[MicroBatch],
        n_tokens: Tensor,
        balancer: Balancer,
        context: Context | None,
    ) -> None:
        """`batches` on the device, `context` if they hold a part of the positions; `n_tokens` int64, the
        labels of the global batch (ENG-4)."""
        self.context = context
        self.batches, self.n_tokens, self.balancer = batches, n_tokens, balancer
        self.scale = n_tokens.to(balancer.tally.aux.dtype).reciprocal()
        """1 / N_tok."""
        self.loss = torch.zeros_like(self.scale)
        """Σ CE / N_tok of the micro-batches so far."""


class Plain:
    """A stage's layers back to back under plain autograd: one engine call per micro-batch and stage."""

    def __init__(
        self,
        model: CausalLM[Any],
        stages: Sequence[int],
        dispatcher: Dispatcher,
        work: Work,
        ranges: Ranges | None = None,
    ) -> None:
        """`stages` are the global numbers of `model.holding.stages`; `ranges` name its layers in a trace."""
        self._ranges = ranges
        self._model, self._dispatcher, self._work = model, dispatcher, work
        self._stages: dict[int, Stage] = dict(zip(stages, model.holding.stages, strict=True))
        self._live: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}

    def forward(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        """See `Program`."""
        part, batch = self._stages[stage], self._work.batches[micro_batch]
        leaf = None if received is None else received.detach().requires_grad_()
        balances = self._work.balancer.bind(batch, self._work.n_tokens)
        into = batch.ids_BS if leaf is None else leaf
        if self._ranges is not None:
            self._model.around = self._ranges.around(part.layers.start)
        out: Tensor = self._model(
            into, model_batch(batch, balances, self._work.context), self._dispatcher, part
        )
        self._model.around = None
        if part.last:
            out = self._model.loss(out, batch.labels_BS, self._work.scale)
            self._work.loss = self._work.loss + out.detach()
        self._live[stage, micro_batch] = (leaf, out)
        return out.detach()

    def backward(self, stage: int, micro_batch: int, gradient: Tensor | None, defer: bool) -> Tensor | None:
        """See `Program`."""
        leaf, out = self._live.pop((stage, micro_batch))
        torch.autograd.backward(out, gradient)
        return None if leaf is None else leaf.grad

    def weights(self, stage: int, micro_batch: int) -> None:
        """See `Program`."""
