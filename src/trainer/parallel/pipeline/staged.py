"""The five stages of each layer as operations of their own: forward, backward, recomputation (ENG-10 to 12).

A layer is `attend`, `dispatch`, `experts`, `combine`, `aggregate`; the aggregate of one layer and the next
one's attention need nothing from outside between them and are one operation. A forward is a generator that
stops after each operation: run to its end it is the sequential path, and an executor that takes turns between
two of them overlaps the communication of one with the products of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from src.models.build import CausalLM, Stage
from src.models.protocol import Batch, Carry, Dispatcher, Layer, Routing
from src.trainer.parallel.inputs import model_batch
from src.trainer.parallel.pipeline.deferral import Deferral, Waiting, settle
from src.trainer.parallel.pipeline.program import Work
from src.trainer.parallel.pipeline.tape import Compute, Tape, Value
from src.trainer.ranges import Ranges, within

Operations = Generator[str, None, Tensor]
"""The names of operations just done; returns what the stage sends on."""


class Staged:
    """A rank's stages, cut where communication happens (`program.Program`)."""

    def __init__(
        self,
        model: CausalLM[Any],
        stages: Sequence[int],
        dispatcher: Dispatcher,
        work: Work,
        deferral: Deferral,
        recompute: str,
        gather: Callable[[], None],
        poison: bool,
        ranges: Ranges | None = None,
    ) -> None:
        """`gather` brings sharded parameters together; calling it again costs nothing. `ranges` name what is
        done in a trace, as `3.attend.forward`."""
        self._model, self._dispatcher, self._work = model, dispatcher, work
        self._stages: dict[int, Stage] = dict(zip(stages, model.holding.stages, strict=True))
        self._deferral, self._recompute = deferral, recompute
        self._gather, self._poison, self._ranges = gather, poison, ranges
        self._flights: dict[tuple[int, int], Flight] = {}

    def forward(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        """See `program.Program`."""
        operations = self.operations(stage, micro_batch, received)
        while True:
            try:
                next(operations)
            except StopIteration as end:
                out: Tensor = end.value
                return out

    def operations(self, stage: int, micro_batch: int, received: Tensor | None) -> Operations:
        """The forward, one operation at a time."""
        self._gather()
        part, batch = self._stages[stage], self._work.batches[micro_batch]
        balances = self._work.balancer.bind(batch, self._work.n_tokens)
        seen = model_batch(batch, balances, self._work.context)
        flight = self._flights[stage, micro_batch] = Flight(Tape(self._poison, self._ranges), received)
        values, tail = flight.inputs, self._enter(batch.ids_BS)
        if self._recompute == "full":
            values, tail = flight.tape.call(tail, values, name=f"stage{stage}.enter"), _same
        for index in part.layers:
            layer: Any = self._model.model.layers[str(index)]
            visit = Visit(layer, seen.at(index) if layer.is_moe else seen, self._dispatcher)
            if self._recompute == "full":
                values = flight.tape.call(visit.whole, values, recompute=True, name=f"{index}.layer")
                yield "layer"
            else:
                values = yield from self._layer(flight.tape, index, visit, tail, values)
                tail = visit.aggregate
        leave = self._leave(tail, seen, batch.labels_BS, part)
        (flight.out,) = flight.tape.call(leave, values, name=f"stage{stage}.leave")
        flight.tape.keep(flight.out)
        if part.last:
            self._work.loss = self._work.loss + flight.out.tensor
        return flight.out.tensor

    def _layer(
        self, tape: Tape, index: int, visit: Visit, tail: Compute, values: Sequence[Value]
    ) -> Generator[str, None, Sequence[Value]]:
        again = self._recompute == "stage"
        tokens, *rest = tape.call(_joined(tail, visit.attend), values, again, f"{index}.attend")
        yield "attend"
        rows: Sequence[Value] = (tokens,)
        if visit.layer.is_moe:
            rows = tape.call(visit.dispatch, rows, name=f"{index}.dispatch")
            yield "dispatch"
        rows = tape.call(visit.experts, rows, again, f"{index}.experts")
        yield "experts"
        if visit.returns:
            rows = tape.call(visit.combine, rows, name=f"{index}.combine")
            yield "combine"
        return [*rows, *rest]

    def _enter(self, ids_BS: Tensor) -> Compute:
        """What was received as the layers take it; on the first stage the embedding of the ids."""

        def enter(*received: Tensor, again: bool) -> tuple[Tensor]:
            (x,) = received or (ids_BS,)
            return (self._model.enter(x, not received),)

        return enter

    def _leave(self, tail: Compute, seen: Batch, labels_BS: Tensor, part: Stage) -> Compute:
        """What the stage sends on, or the micro-batch's part of the loss."""

        def leave(*tensors: Tensor, again: bool) -> tuple[Tensor]:
            (hidden_TD,) = tail(*tensors, again=again)
            hidden_BSD = self._model.leave(hidden_TD, seen, part)
            return (self._model.loss(hidden_BSD, labels_BS, self._work.scale) if part.last else hidden_BSD,)

        return leave

    def backward(self, stage: int, micro_batch: int, gradient: Tensor | None, defer: bool) -> Tensor | None:
        """See `program.Program`."""
        flight = self._flights[stage, micro_batch]
        assert flight.out is not None
        flight.out.give(torch.ones_like(flight.out.tensor) if gradient is None else gradient)
        if defer:
            with self._deferral.collect(flight.waiting):
                flight.tape.backward()
        else:
            flight.tape.backward()
            self._release(stage, micro_batch)
        return flight.inputs[0].take() if flight.inputs else None

    def weights(self, stage: int, micro_batch: int) -> None:
        """See `program.Program`."""
        with within(self._ranges, f"stage{stage}.weights.backward"):
            settle(self._flights[stage, micro_batch].waiting)
        self._release(stage, micro_batch)

    def _release(self, stage: int, micro_batch: int) -> None:
        self._flights.pop((stage, micro_batch)).tape.release()


class Flight:
    """One stage's passage of one micro-batch, from its forward to its last weight gradient."""

    def __init__(self, tape: Tape, received: Tensor | None) -> None:
        self.tape = tape
        self.inputs: Sequence[Value] = () if received is None else (Value(received),)
        self.out: Value | None = None
        self.waiting: Waiting = []


class Visit:
    """The stages of one layer on one micro-batch, and what passes between them without a gradient."""

    def __init__(self, layer: Layer, batch: Batch, dispatcher: Dispatcher) -> None:
        self.layer = layer
        self.returns = layer.is_moe and dispatcher.returns
        self._batch, self._dispatcher = batch, dispatcher
        self._ids_TK: Tensor | None = None
        self._counts_E: Tensor | None = None
        self._plan: object = None

    def attend(self, hidden_TD: Tensor, *, again: bool) -> tuple[Tensor, ...]:
        """Stage 1; when done again it takes the experts chosen before and counts nothing (ENG-26)."""
        seen = self._batch if not again else self._batch.again(self._ids_TK)
        tokens_TD, routing, carry = self.layer.attend(hidden_TD, seen)
        if routing is None:
            return tokens_TD, carry.residual_TD
        self._ids_TK = routing.ids_TK
        return tokens_TD, carry.residual_TD, routing.weights_TK

    def dispatch(self, tokens_TD: Tensor, *, again: bool) -> tuple[Tensor]:
        """Stage 2; when done again the rows go as before, without a look at the device."""
        if again:
            return (self._dispatcher.dispatch_again(tokens_TD, self._plan),)
        assert self._ids_TK is not None
        rows_RD, self._counts_E, self._plan = self._dispatcher.dispatch(tokens_TD, self._ids_TK)
        return (rows_RD,)

    def experts(self, rows_RD: Tensor, *, again: bool) -> tuple[Tensor]:
        """Stage 3."""
        return (self.layer.experts(rows_RD, self._counts_E),)

    def combine(self, rows_RD: Tensor, *, again: bool) -> tuple[Tensor]:
        """Stage 4."""
        return (self._dispatcher.combine(rows_RD, self._plan),)

    def aggregate(
        self, rows: Tensor, residual_TD: Tensor, weights_TK: Tensor | None = None, *, again: bool
    ) -> tuple[Tensor]:
        """Stage 5."""
        if weights_TK is None:
            return (self.layer.aggregate(rows, None, Carry(residual_TD)),)
        assert self._ids_TK is not None
        routing, home_TK = Routing(self._ids_TK, weights_TK), self._dispatcher.home(self._plan)
        return (self.layer.aggregate(rows, routing, Carry(residual_TD), home_TK),)

    def whole(self, hidden_TD: Tensor, *, again: bool) -> tuple[Tensor]:
        """All five back to back."""
        tokens_TD, *rest = self.attend(hidden_TD, again=again)
        rows = (tokens_TD,)
        if self.layer.is_moe:
            rows = self.dispatch(*rows, again=again)
        rows = self.experts(*rows, again=again)
        if self.returns:
            rows = self.combine(*rows, again=again)
        return self.aggregate(*rows, *rest, again=again)


def _joined(first: Compute, second: Compute) -> Compute:
    """Two operations as one: the boundary between two layers."""

    def both(*tensors: Tensor, again: bool) -> tuple[Tensor, ...]:
        return second(*first(*tensors, again=again), again=again)

    return both


def _same(hidden_TD: Tensor, *, again: bool) -> tuple[Tensor]:
    return (hidden_TD,)
