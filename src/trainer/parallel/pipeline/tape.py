"""Operations of one micro-batch with a graph each, so that an engine can run them apart (ENG-11, ENG-12).

Between two operations stand values: tensors without a graph, which one operation makes and one reads. Going
back, each operation is one call of autograd, or two where its forward is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from src.trainer.ranges import Ranges, within

Compute = Callable[..., tuple[Tensor, ...]]
"""(tensors…, again=whether it is the second forward of a recomputation) → tensors."""


class Value:
    """A tensor at a boundary, and on the way back its gradient."""

    __slots__ = ("_gradient", "_tensor", "_was_given")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self._gradient: Tensor | None = None
        self._was_given = False

    @property
    def tensor(self) -> Tensor:
        """The tensor, while it is kept."""
        assert self._tensor is not None, "the value was dropped"
        return self._tensor

    def drop(self) -> None:
        """Let the tensor go."""
        self._tensor = None

    def give(self, gradient: Tensor | None) -> None:
        """Hand the gradient back, once (ENG-10)."""
        assert not self._was_given, "a gradient was handed back twice"
        self._gradient, self._was_given = gradient, True

    def take(self) -> Tensor | None:
        """The gradient, which is forgotten here."""
        gradient, self._gradient = self._gradient, None
        return gradient


class Record:
    """One operation: forward at once, backward when its turn comes, each once."""

    def __init__(self, compute: Compute, inputs: Sequence[Value], recompute: bool) -> None:
        self._compute: Compute | None = compute
        self._inputs = tuple(inputs)
        self._graph: tuple[list[Tensor], tuple[Tensor, ...]] | None = None
        if recompute:
            with torch.no_grad():
                made = compute(*(value.tensor for value in inputs), again=False)
        else:
            self._graph = self._forward(again=False)
            made = self._graph[1]
            for value in inputs:
                value.drop()  # What autograd needs of it, it keeps.
        self.outputs = tuple(Value(tensor.detach()) for tensor in made)
        """What the operations after it read."""

    def backward(self) -> None:
        """Pass the gradients of the outputs on to the inputs, and let the graph go."""
        assert self._compute is not None, "an operation went backward twice"
        leaves, made = self._graph or self._forward(again=True)
        pairs = [(t, g) for t, v in zip(made, self.outputs, strict=True) if (g := v.take()) is not None]
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        for value, leaf in zip(self._inputs, leaves, strict=True):
            value.give(leaf.grad)
        self._compute = self._graph = None
        self._inputs = ()

    def _forward(self, again: bool) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        assert self._compute is not None
        leaves = [value.tensor.detach().requires_grad_() for value in self._inputs]
        return leaves, self._compute(*leaves, again=again)


class Tape:
    """The operations of one stage on one micro-batch, in order."""

    def __init__(self, poison: bool, ranges: Ranges | None = None) -> None:
        """With `poison`, what nobody may read any more is filled with NaN (ENG-12); `ranges` name operations
        in a trace."""
        self._records: list[tuple[str, Record]] = []
        self._ranges = ranges
        self._poison, self._dead = poison, list[Tensor]()

    def call(
        self, compute: Compute, inputs: Sequence[Value], recompute: bool = False, name: str = "-"
    ) -> tuple[Value, ...]:
        """Run an operation forward; `recompute` keeps its inputs only, `name` is for a trace."""
        with within(self._ranges, f"{name}.forward"):
            record = Record(compute, inputs, recompute)
        self._records.append((name, record))
        if self._poison:
            self._dead += [value.tensor for value in record.outputs]
        return record.outputs

    def keep(self, value: Value) -> None:
        """Others read this value too, so that it is never released here."""
        self._dead = [tensor for tensor in self._dead if tensor is not value.tensor]

    def backward(self) -> None:
        """All operations in reverse; the gradient of the last output must have been given."""
        while self._records:
            name, record = self._records.pop()
            with within(self._ranges, f"{name}.backward"):
                record.backward()

    def release(self) -> None:
        """Nothing of this tape is read from here on, by weight gradients neither."""
        for tensor in self._dead:
            tensor.fill_(torch.nan)
        self._dead.clear()
