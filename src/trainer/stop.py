"""Requests to stop: a signal or the file `control/stop` sets a flag that ranks agree on (AGENT-2)."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

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
