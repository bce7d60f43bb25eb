"""Two sides in turn on one device, the idle one away where both do not fit (BENCH-3)."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator

import torch

from src.bench.clock import spread
from src.bench.park import Garage
from src.bench.side import Side

LOSS_TOLERANCE = 1e-2
"""How far the first losses of two sides may lie apart: they start from the same weights and batch."""
MARGIN = 3 << 30
"""Bytes that stay free when both sides are left on the device: workspaces and fragments."""

Say = Callable[[str], None]


class Floor:
    """Who is on the device. On a CPU both are, always."""

    def __init__(self, device: torch.device, say: Say) -> None:
        self._device, self._say = device, say
        self._garage = Garage()

    def clear(self, side: Side) -> None:
        """Put a side away."""
        if self._device.type == "cuda" and not self._garage.holds(side.name):
            self._timed("parked", side, lambda: self._garage.park(side.name, side.storages()))
            left = torch.cuda.memory_allocated(self._device) / 2**30
            self._say(f"  {left:.1f} GiB stay allocated without {side.name}")

    def bring(self, side: Side, other: Side) -> None:
        """Bring a side back, then put the other away unless both fit: in this order one slab serves both."""
        if self._garage.holds(side.name):
            torch.cuda.empty_cache()
            if torch.cuda.mem_get_info(self._device)[0] < side.state + MARGIN:
                self.clear(other)
            self._timed("brought back", side, lambda: self._garage.bring_back(side.name))
        if not self._both_fit(side, other):
            self.clear(other)

    @contextlib.contextmanager
    def leaving(self, side: Side) -> Iterator[None]:
        """Free what a side has parked once the body is done with it."""
        try:
            yield
        finally:
            self._garage.forget(side.name)

    def _both_fit(self, one: Side, two: Side) -> bool:
        if self._device.type != "cuda":
            return True
        total = torch.cuda.mem_get_info(self._device)[1]
        worst = max(one.peak["reserved"] + two.state, two.peak["reserved"] + one.state)
        return worst + MARGIN < total

    def _timed(self, what: str, side: Side, act: Callable[[], None]) -> None:
        started = time.perf_counter()
        act()
        torch.cuda.synchronize(self._device)
        self._say(f"  {side.name} {what} in {time.perf_counter() - started:.1f} s")


def alternate(ours: Side, peer: Side, blocks: int, steps: int, floor: Floor, say: Say) -> None:
    """Time both sides in blocks, A B A B …; what they took lies in the sides."""
    for _ in range(blocks):
        for side, other in ((ours, peer), (peer, ours)):
            floor.bring(side, other)
            side.block(steps)
            say(f"  {side.name:<12} block {len(side.blocks)}: {side.medians[-1]:9.2f} ms a step")


def check_same_start(ours: Side, peer: Side) -> None:
    """The first losses agree, or the two do not compute the same.

    Raises:
        ValueError: with both losses.
    """
    one, two = ours.loss(0), peer.loss(0)
    if abs(one - two) > LOSS_TOLERANCE:
        raise ValueError(
            f"first losses {one:.4f} ({ours.name}) and {two:.4f} ({peer.name}) differ by more than "
            f"{LOSS_TOLERANCE}: the sides do not compute the same, so that no ratio means anything"
        )


def noise(*sides: Side) -> float:
    """The larger spread of a side against itself; a difference inside it is none."""
    return max(spread(side.medians) for side in sides)


def collect(device: torch.device) -> None:
    """Give back what nothing holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
