"""Shortens the collectives' time-out once every rank has finished a first step (ENG-29)."""

from __future__ import annotations

from datetime import timedelta

from src.durations import seconds
from src.trainer.callbacks.base import Callback
from src.trainer.parallel.timeouts import wait_at_most
from src.trainer.state import Run


class SteadyTimeouts(Callback):
    """Acts once an attempt. The barrier is there for ranks that still compile while this one runs ahead."""

    def __init__(self) -> None:
        self._is_set = False

    def step(self, run: Run) -> None:
        if not self._is_set:
            self._is_set = True
            run.runtime.barrier()
            wait_at_most(run.runtime, timedelta(seconds=seconds(run.config.launcher.collective_timeout)))
