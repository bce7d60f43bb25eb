"""Held-out loss and text samples before, during and after training."""

from __future__ import annotations

from collections.abc import Sequence

from src.trainer.callbacks.base import Callback
from src.trainer.evaluation import evaluate
from src.trainer.sample import continue_prompts
from src.trainer.state import Run


class Evaluating(Callback):
    """Evaluates every `evaluation.every` steps, and at both ends."""

    def __init__(self, listeners: Sequence[Callback]) -> None:
        self._listeners = listeners
        self._last = -1

    def start(self, run: Run) -> None:
        if run.step == 0:
            self._evaluate(run)

    def step(self, run: Run) -> None:
        every = run.config.evaluation.every
        if every and run.step % every == 0:
            self._evaluate(run)

    def end(self, run: Run, stopped: bool) -> None:
        if not stopped and self._last != run.step:
            self._evaluate(run)

    def _evaluate(self, run: Run) -> None:
        self._last = run.step
        record = evaluate(run, self._listeners)
        if run.runtime.rank == 0:
            bits = record["bits_per_byte"]
            in_bits = "" if bits is None else f", {bits:.3f} bits per byte"
            print(f"step {run.step}: held-out loss {record['loss']:.4f} nats{in_bits}", flush=True)
        samples = continue_prompts(run)
        for listener in self._listeners:
            listener.evaluated(run, record, samples)
