"""Time one operation: every implementation of it in turn on rotated inputs, forward or with its backward.

What is asked for is a `Subject`: inputs, and the `Side`s that are timed on them block by block, A B C A B C,
so that whatever drifts drifts for all (BENCH-1 to BENCH-3).
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from src.bench.place import Key, Place
from src.bench.stopwatch import CACHE, Inputs, Rotation, Stopwatch, Warm

FORWARD, TRAINING = "fwd", "fwd+bwd"
DIRECTIONS = (FORWARD, TRAINING)
BLOCKS = 3
"""Blocks a side, in turn."""


@dataclass(frozen=True)
class Cost:
    """What one call has to do at least, by formula: operations of products, or bytes where memory bounds."""

    flops: int | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class Side:
    """One way to compute a subject's operation."""

    key: Key
    call: Callable[[Inputs], Any]
    """The forward; returns a tensor, or the tensors that `grads` are the gradients of."""
    cost: Mapping[str, Cost]
    """Direction → cost; a direction that is not here is not measured."""
    leaves: tuple[str, ...] = ()
    """Inputs whose gradients the backward computes."""
    grads: tuple[str, ...] = ()
    """Inputs that are upstream gradients."""
    training: Callable[[Inputs], Any] | None = None
    """Forward and backward, where autograd is not what joins them."""
    reset: Callable[[Inputs], object] = lambda inputs: None
    """What is done to inputs before each call and not timed, where a call writes over them."""
    is_auto: bool = False
    """Whether `kernels=auto` takes it here."""
    is_compiled: bool = False
    """Whether torch's compiler has it."""

    def run(self, direction: str, inputs: Inputs) -> Any:
        """One call; gradients are returned, never accumulated."""
        if direction == FORWARD:
            with torch.no_grad():
                return self.call(inputs)
        if self.training is not None:
            return self.training(inputs)
        found = self.call(inputs)
        outputs = (found,) if isinstance(found, Tensor) else tuple(found)
        leaves, grads = ([inputs[name] for name in names] for names in (self.leaves, self.grads))
        return torch.autograd.grad(outputs, leaves, grads)


@dataclass(frozen=True)
class Subject:
    """Inputs of one shape, and who computes with them."""

    case: str
    sizes: Mapping[str, Any]
    make: Callable[[], Inputs]
    """A new set of inputs."""
    sides: Sequence[Side]
    other: Key | None
    """The side that the others are compared with; None is the fastest."""
    missing: Mapping[Key, str] = field(default_factory=dict)
    """What cannot run here, and why."""

    def of(self, direction: str) -> list[Side]:
        """The sides that have this direction."""
        return [side for side in self.sides if direction in side.cost]


@dataclass
class Timing:
    """What was measured of one side in one direction; without times or an error it had no room."""

    subject: Subject
    side: Side
    direction: str
    warm: Warm = field(default_factory=Warm)
    """Of the first calls."""
    blocks: list[list[float]] = field(default_factory=list)
    """Milliseconds of each call of each block."""
    error: str | None = None
    """Why it was not measured, where that was not memory."""
    other: Timing | None = None
    """What it is compared with."""

    @property
    def times(self) -> list[float]:
        """Milliseconds of all timed calls."""
        return [time for block in self.blocks for time in block]

    @property
    def medians(self) -> list[float]:
        """Median of each block in milliseconds."""
        return [statistics.median(block) for block in self.blocks]

    @property
    def median(self) -> float:
        """Median of the blocks' medians in milliseconds."""
        return statistics.median(self.medians)


def measure(subject: Subject, direction: str, steps: int, where: Place, watch: Stopwatch) -> list[Timing]:
    """Time every side that has the direction, `BLOCKS` blocks of `steps` calls each, in turn."""
    found = [Timing(subject, side, direction) for side in subject.of(direction)]
    try:
        rotation = Rotation(subject.make, CACHE[where.device.type])
    except torch.OutOfMemoryError:
        return found
    left = list(found)
    for block in range(1 + BLOCKS):
        for timing in tuple(left):
            if not _went_well(timing, rotation, watch, steps, is_first=block == 0):
                timing.blocks.clear()
                left.remove(timing)
                collect(where.device)
    _compare(subject, left)
    return found


def _went_well(timing: Timing, rotation: Rotation, watch: Stopwatch, steps: int, is_first: bool) -> bool:
    """One block of a side, or its first calls; what it had on the device goes with the error it raises."""

    side, direction = timing.side, timing.direction

    def before() -> None:
        side.reset(rotation.turn())

    def call() -> object:
        return side.run(direction, rotation.now)

    try:
        if is_first:
            timing.warm = watch.warm(before, call, steps, rotation)
        else:
            timing.blocks.append(watch.block(before, call, steps, timing.warm.issued_ms))
    except torch.OutOfMemoryError:
        return False
    except Exception as error:  # The others may still run.
        timing.error = f"{type(error).__name__}: {error}".splitlines()[0]
        return False
    return True


def collect(device: torch.device) -> None:
    """Give back memory of a card that nobody holds: it may be what the next one wants."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _compare(subject: Subject, timings: Sequence[Timing]) -> None:
    """Name each side's other."""
    if subject.other is None:
        other = min(timings, key=lambda timing: timing.median, default=None)
    else:
        other = next((timing for timing in timings if timing.side.key == subject.other), None)
    for timing in timings:
        timing.other = other
