"""Calls of one operation on a device: inputs that no cache holds, and times while the host is ahead."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from src.bench.clock import time_calls
from src.bench.groups import spans

CACHE = {"cuda": 180 << 20, "cpu": 1 << 16}
"""Bytes of other inputs between two uses of one. A call touches a third of its set, so an L2 of 60 MB holds
nothing of it."""
SETS = 256
"""Of inputs at most: those of the tiny cases would be tens of thousands, each with layers of its own."""
WARMUP = 2
"""Calls of a side before anything is timed, after the one that compiles."""
AHEAD = 4096
"""Side of the products that keep a GPU busy until the host has issued a block."""
AHEAD_MS = 60.0
"""They take no longer than this."""

Inputs = dict[str, Any]
Call = Callable[[], object]


@dataclass(frozen=True)
class Warm:
    """What the first calls of a side told; memory and launches of a GPU alone."""

    issued_ms: float = 0.0
    """Milliseconds that the host takes to issue a block."""
    extra_bytes: int | None = None
    """Most memory that a call allocated beyond its inputs and what it returns."""
    launches: int | None = None
    """Kernels, copies and fills of one call."""


class Rotation:
    """Sets of inputs one after the other: before one comes again, a cache has seen as much as it holds."""

    now: Inputs
    """The set whose turn it is."""

    def __init__(self, make: Callable[[], Inputs], cache: int) -> None:
        first = make()
        self.size = max(1, sum(tensor.nbytes for tensor in tensors(first)))
        others = min(math.ceil(cache / self.size), SETS - 1)
        self.sets = [first, *(make() for _ in range(others))]
        self._turns = 0

    def turn(self) -> Inputs:
        """Go to the set whose last use is longest ago."""
        self.now = self.sets[self._turns % len(self.sets)]
        self._turns += 1
        return self.now

    def fresh_bytes(self, result: object) -> int:
        """Memory that a result has and no set of inputs."""
        held = {tensor.untyped_storage().data_ptr() for tensor in tensors(self.sets)}
        storages = [tensor.untyped_storage() for tensor in tensors(result)]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(size for place, size in sizes.items() if place not in held)


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
    """Calls on one device, timed while the host is ahead of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._factors: tuple[Tensor, ...] = ()
        if device.type == "cuda":
            shape = (AHEAD, AHEAD)
            draws = torch.Generator(device).manual_seed(0)
            empty = (torch.empty(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
            self._factors = tuple(x.normal_(generator=draws) for x in empty)
            self._product_ms = min(time_calls(self._product, 8, device))

    def warm(self, before: Call, call: Call, count: int, rotation: Rotation) -> Warm:
        """First calls, on a GPU followed by as many as a block has, and by one that is traced."""
        before()
        returned = rotation.fresh_bytes(call())
        if self._device.type != "cuda":
            return Warm()
        peaks = [self._peak(before, call) for _ in range(WARMUP)]
        start = time.perf_counter()
        for _ in range(count):
            before()
            call()
        issued = 1e3 * (time.perf_counter() - start)
        torch.cuda.synchronize(self._device)
        return Warm(issued, max(0, max(peaks) - returned), self._launches(before, call))

    def block(self, before: Call, call: Call, count: int, issued_ms: float) -> list[float]:
        """Milliseconds of each call but the first, which is not timed; nor is what comes before each.

        On a GPU between events, while products pass the time that the host takes to issue them all.
        """
        before()
        call()
        if not self._factors:
            return [self._on_host(before, call) for _ in range(count)]
        torch.cuda.synchronize(self._device)
        for _ in range(math.ceil(min(1.5 * issued_ms, AHEAD_MS) / self._product_ms)):
            self._product()
        pairs = [(_event(), _event()) for _ in range(count)]
        for start, end in pairs:
            before()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) for start, end in pairs]

    def _on_host(self, before: Call, call: Call) -> float:
        before()
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)

    def _peak(self, before: Call, call: Call) -> int:
        """Bytes that a call allocates at most, what it returns among them."""
        before()
        torch.cuda.synchronize(self._device)
        held = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        call()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - held

    def _launches(self, before: Call, call: Call) -> int:
        before()
        activity = torch.profiler.ProfilerActivity
        torch.cuda.synchronize(self._device)
        with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as tracer:
            call()
            torch.cuda.synchronize(self._device)
        return len(spans(tracer.events(), self._device))

    def _product(self) -> None:
        torch.mm(*self._factors)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
