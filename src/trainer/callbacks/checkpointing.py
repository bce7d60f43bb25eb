"""Saves a run: every `checkpoint.every` steps, when asked to stop, and at the end (`checkpoint.final`)."""

from __future__ import annotations

from typing import Any

from src.trainer.callbacks.base import Callback
from src.trainer.checkpoint.retention import retain
from src.trainer.checkpoint.save import save
from src.trainer.state import Run


class Checkpointing(Callback):
    """Publishes complete checkpoints and keeps the newest ones."""

    def __init__(self) -> None:
        self._saved = -1

    def start(self, run: Run) -> None:
        self._saved = run.step

    def step(self, run: Run) -> None:
        every = run.config.checkpoint.every
        if every and run.step % every == 0 and run.step < run.config.max_steps:
            self._save(run)

    def end(self, run: Run, stopped: bool) -> None:
        if self._saved != run.step and (stopped or run.config.checkpoint.final):
            self._save(run)

    def _save(self, run: Run) -> None:
        self._saved = run.step
        scalars: dict[str, Any] = {"step": run.step, "tokens_total": run.tokens_total}
        scalars |= {"updates": run.optimizer.updates, **run.health.state()}
        save(
            config=run.config,
            run_dir=run.directory,
            attempt=run.attempt,
            step=run.step,
            backend=run.backend,
            moments=run.optimizer.moments,
            scalars=scalars,
            runtime=run.runtime,
            data_key=run.data.key,
        )
        if run.runtime.rank == 0:
            retain(run.config, run.directory, protect=run.step)
