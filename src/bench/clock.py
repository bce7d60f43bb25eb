"""Times on the device's own clock, and the rates that this machine can reach at best (BENCH-2)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

REPEATS = 12
"""Measurements of a ceiling, after three that are thrown away."""
SIZES = {"cuda": (8192, 4 << 30, torch.bfloat16), "cpu": (256, 1 << 20, torch.float32)}
"""Kind of device → side of the square product, bytes that are copied, dtype of the product."""


@dataclass(frozen=True)
class Ceilings:
    """What one product and one copy reach."""

    gemm_tflops: float
    copy_gbs: float
    """10^9 bytes a second, read and written ones counted."""


def time_calls(call: Callable[[], object], count: int, device: torch.device) -> list[float]:
    """Milliseconds of each of `count` calls; on a GPU between events, so that the host may run ahead."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(count):
            call()
            marks.append(time.perf_counter())
        return [1e3 * (after - before) for before, after in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) for before, after in pairwise(events)]


def measure_ceilings(device: torch.device) -> Ceilings:
    """Both ceilings, on random data: zeros draw less power and run faster."""
    side, size, dtype = SIZES[device.type]
    draws = torch.Generator(device).manual_seed(0)
    a, b = (torch.empty(side, side, device=device, dtype=dtype).normal_(generator=draws) for _ in range(2))
    product = torch.empty_like(a)
    flops = 2 * side**3 / _median_ms(lambda: torch.mm(a, b, out=product), device)
    source = torch.empty(size, device=device, dtype=torch.uint8).random_(0, 256, generator=draws)
    target = torch.empty_like(source)
    copied = 2 * size / _median_ms(lambda: target.copy_(source), device)
    return Ceilings(gemm_tflops=flops / 1e9, copy_gbs=copied / 1e6)


def _median_ms(call: Callable[[], object], device: torch.device) -> float:
    return statistics.median(time_calls(call, REPEATS + 3, device)[3:])


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, between neighbours by distance."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def spread(medians: Sequence[float]) -> float:
    """How far a side's own block medians lie apart, as a share of their median: A against A (BENCH-3)."""
    return (max(medians) - min(medians)) / statistics.median(medians)
