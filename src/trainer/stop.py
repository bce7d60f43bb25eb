"""Requests to stop: a signal or the file `control/stop` sets a flag that ranks agree on (AGENT-2)."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class StopRequest:
    """Whether this rank was asked to stop. A handler saves nothing; the loop acts at a step boundary."""

    def __init__(self, control: Path) -> None:
        self._file = control / "stop"
        self._signalled = False

    def install(self) -> StopRequest:
        """Catch the stop signals; to be called in the main thread."""
        for number in SIGNALS:
            signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def asked(self) -> bool:
        """True once a signal came or the file exists."""
        self._signalled = self._signalled or self._file.exists()
        return self._signalled


class Agreement:
    """What all ranks together say of stopping, read without waiting for the step under way (ENG-8)."""

    def __init__(self) -> None:
        self._earlier: tuple[Tensor, torch.cuda.Event] | None = None

    def reached(self, askers: Tensor) -> bool:
        """True if any rank was asked to stop, by `askers`, a device scalar equal on all ranks.

        On a GPU the answer is that of the call before: it lies in pinned memory since the start of a step
        that is all but over, so nothing waits for the kernels just queued, and all ranks still stop after
        the same step.
        """
        if askers.device.type == "cpu":
            return bool(askers.item())
        earlier = self._earlier
        copy, copied = askers.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self._earlier = copy, copied
        if earlier is None:
            return False
        earlier[1].synchronize()
        return bool(earlier[0].item())
