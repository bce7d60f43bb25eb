"""The moments of a run that a callback may use; everything optional in the loop is one of these."""

from __future__ import annotations

from typing import Any

from src.trainer.data.batch import MicroBatch, StepBatch
from src.trainer.state import Run


class Callback:
    """Does nothing at each moment; a callback overrides those it needs. All ranks call all, in order."""

    def start(self, run: Run) -> None:
        """Before the first step of an attempt."""

    def batch(self, run: Run, batch: StepBatch) -> None:
        """With the micro-batches of the coming step."""

    def heldout(self, run: Run, number: int, micro_batch: MicroBatch) -> None:
        """With a micro-batch that an evaluation is about to read, counted from 0."""

    def step(self, run: Run) -> None:
        """After a step; `run.step` counts it."""

    def metrics(self, run: Run, lines: list[dict[str, Any]]) -> None:
        """With the lines of a flush."""

    def evaluated(self, run: Run, record: dict[str, Any], samples: list[dict[str, Any]]) -> None:
        """With a held-out evaluation and the text samples drawn beside it."""

    def end(self, run: Run, stopped: bool) -> None:
        """After the last step of an attempt."""

    def close(self, run: Run) -> None:
        """On every way out, after `end` or after an error."""
