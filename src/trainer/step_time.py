"""How long a step took: by the host's clock on a CPU, by the device's on a GPU."""

from __future__ import annotations

import time

import torch


class StepTime:
    """Seconds from its making to `stop`.

    On a GPU the host runs ahead of the kernels it queues, so its own clock says how long queuing took: steps
    of 214 ms were reported as 135 (LOG.md, 2026-12-01). Events are read once their step is over, at a flush.
    """

    def __init__(self, device: torch.device) -> None:
        self._begun = time.perf_counter()
        self._host: float | None = None
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            self._events = begin, end

    def stop(self) -> None:
        """Mark the end, behind all that was queued; waits for nothing."""
        self._host = time.perf_counter() - self._begun
        if self._events is not None:
            self._events[1].record()

    @property
    def seconds(self) -> float:
        """The time; waits for the end of the step on a GPU."""
        assert self._host is not None, "the step has not been stopped"
        if self._events is None:
            return self._host
        begin, end = self._events
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
