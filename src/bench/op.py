"""Time one operation: every implementation of it in turn on rotated inputs, forward or with its backward.

What is asked for is a `Subject`: inputs, and the `Side`s that are timed on them block by block, A B C A B C,
so that whatever drifts drifts for all (BENCH-1 to BENCH-3).
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from src.bench.clock import time_calls
from src.bench.place import Key, Place

FORWARD, TRAINING = "fwd", "fwd+bwd"
DIRECTIONS = (FORWARD, TRAINING)
CACHE = {"cuda": 180 << 20, "cpu": 1 << 16}
"""Bytes of other inputs between two uses of one. A call touches a third of its set, so an L2 of 60 MB holds
nothing of it."""
BLOCKS = 3
"""Blocks a side, in turn."""
WARMUP = 2
"""Calls of a side before anything is timed, after the one that compiles."""
AHEAD = 4096
"""Side of the products that keep a GPU busy until the host has issued a block."""
AHEAD_MS = 60.0
"""They take no longer than this."""

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Cost:
    """What one call has to do at least, by formula; None where it does not count."""

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
    """What was measured of one side in one direction; without times it had no room."""

    subject: Subject
    side: Side
    direction: str
    blocks: list[list[float]] = field(default_factory=list)
    """Milliseconds of each call of each block."""
    peak_bytes: int | None = None
    """Most memory that a call allocated beyond its inputs; None on a CPU."""
    other: Timing | None = None
    """What it is compared with."""

    @property
    def times(self) -> list[float]:
        """Milliseconds of all timed calls."""
        return [time for block in self.blocks for time in block]

    @property
    def median(self) -> float:
        """Median of the blocks' medians in milliseconds."""
        return statistics.median(map(statistics.median, self.blocks))


class Rotation:
    """Sets of inputs one after the other: before one comes again, a cache has seen as much as it holds."""

    def __init__(self, make: Callable[[], Inputs], cache: int) -> None:
        first = make()
        self.size = max(1, sum(tensor.nbytes for tensor in tensors(first)))
        others = math.ceil(cache / self.size)
        self.sets = [first, *(make() for _ in range(others))]
        self._calls = 0

    def next(self) -> Inputs:
        """The set whose last use is longest ago."""
        self._calls += 1
        return self.sets[(self._calls - 1) % len(self.sets)]


def tensors(value: Any) -> Iterator[Tensor]:
    """Those in a set of inputs, however nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors(part)


class Stopwatch:
    """Blocks of calls on one device, timed while the host is ahead of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._factors: tuple[Tensor, ...] = ()
        if device.type == "cuda":
            draws = torch.Generator(device).manual_seed(0)
            empty = (torch.empty(AHEAD, AHEAD, device=device, dtype=torch.bfloat16) for _ in range(2))
            self._factors = tuple(x.normal_(generator=draws) for x in empty)
            self._product_ms = min(time_calls(self._product, 8, device))

    def warm(self, call: Callable[[], object], count: int) -> tuple[float, int | None]:
        """Milliseconds that the host takes to issue `count` calls, and bytes that one allocates at most."""
        call()
        if self._device.type != "cuda":
            return 0.0, None
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        for _ in range(WARMUP):
            call()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device) - before
        start = time.perf_counter()
        for _ in range(count):
            call()
        issued = 1e3 * (time.perf_counter() - start)
        torch.cuda.synchronize(self._device)
        return issued, peak

    def block(self, call: Callable[[], object], count: int, issued_ms: float) -> list[float]:
        """Milliseconds of each call after one; what the host takes to issue them passes before the first."""
        call()
        if not self._factors:
            return time_calls(call, count, self._device)
        products = math.ceil(min(1.5 * issued_ms, AHEAD_MS) / self._product_ms)

        def ahead() -> None:
            for _ in range(products):
                self._product()

        return time_calls(call, count, self._device, ahead)

    def _product(self) -> None:
        torch.mm(*self._factors)


def measure(subject: Subject, direction: str, steps: int, where: Place, watch: Stopwatch) -> list[Timing]:
    """Time every side that has the direction, `BLOCKS` blocks of `steps` calls each, in turn."""
    found = [Timing(subject, side, direction) for side in subject.of(direction)]
    try:
        rotation = Rotation(subject.make, CACHE[where.device.type])
    except torch.OutOfMemoryError:
        return found
    issued: dict[Key, float] = {}
    left = list(found)
    for block in range(1 + BLOCKS):
        for timing in tuple(left):

            def call(timing: Timing = timing) -> object:
                return timing.side.run(direction, rotation.next())

            try:
                if block == 0:
                    issued[timing.side.key], timing.peak_bytes = watch.warm(call, steps)
                else:
                    timing.blocks.append(watch.block(call, steps, issued[timing.side.key]))
            except torch.OutOfMemoryError:
                timing.blocks.clear()
                left.remove(timing)
            if timing not in left:  # The error itself held what the side had.
                collect(where.device)
    _compare(subject, left)
    return found


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
