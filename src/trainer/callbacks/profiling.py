"""`profile.steps`: a trace of some steps, and on a GPU the allocator's history, in `RUN/profile` (PROF-1).

Without the option nobody makes this callback, so that a run pays nothing for it (PROF-2).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from src.config import Config
from src.errors import Problem, UserError
from src.trainer.callbacks.base import Callback
from src.trainer.ranges import Ranges
from src.trainer.state import Run

END = "manyhead: end of the window"
"""Range in the trace in which tracing itself waits for the device; from there on the run does nothing."""
HISTORY = 100_000
"""Newest allocations and frees of which the history keeps who asked for them."""


class Profiling(Callback):
    """Traces the window on this rank; the last of the callbacks, so that a step's own end with it."""

    def __init__(self, config: Config, device: torch.device) -> None:
        """Raises `UserError` (3): the allocator of a CPU has no history."""
        self._options = config.profile
        self._first, self._last = config.profile.steps
        self._tracer: torch.profiler.profile | None = None
        if config.profile.memory and device.type != "cuda":
            message = f"true, but this run is on {device.type}, whose allocator keeps no history"
            raise UserError([Problem("profile.memory", message, "profile.memory=false", "BENCH-4")], code=3)

    def start(self, run: Run) -> None:
        if run.step >= self._first:
            print(f"nothing is traced: step {self._first} lies before step {run.step}, where this begins")
        self._begin(run, warm_up=run.step == self._first - 2)

    def step(self, run: Run) -> None:
        if self._tracer is not None:
            self._advance(run, self._tracer)
        elif run.step == self._first - 2:
            self._begin(run, warm_up=True)

    def close(self, run: Run) -> None:
        """A window that the run did not reach the end of leaves no file."""
        if self._tracer is not None:
            self._tracer.on_trace_ready = None
            self._tracer.stop()

    def _begin(self, run: Run, warm_up: bool) -> None:
        if run.step not in (self._first - 2, self._first - 1):
            return
        count = self._last - self._first + 1
        activity = torch.profiler.ProfilerActivity
        on_gpu = run.runtime.device.type == "cuda"
        self._tracer = torch.profiler.profile(
            activities=[activity.CPU, activity.CUDA] if on_gpu else [activity.CPU],
            schedule=torch.profiler.schedule(wait=0, warmup=int(warm_up), active=count, repeat=1),
            record_shapes=True,
            on_trace_ready=lambda tracer: self._write(run, tracer),
        )
        _finish_kernels(run)
        self._tracer.start()
        run.backend.annotate(Ranges(run.runtime.device))
        if self._options.memory:
            torch.cuda.memory._record_memory_history(max_entries=HISTORY)

    def _advance(self, run: Run, tracer: torch.profiler.profile) -> None:
        """Kernels of the steps around the window stay out of it, and all of its own are in."""
        if run.step == self._first - 1:
            _finish_kernels(run)
        if run.step == self._last:
            run.backend.annotate(None)
            with torch.profiler.record_function(END):
                _finish_kernels(run)
            tracer.add_metadata_json("manyhead", json.dumps(facts(run)))
        tracer.step()
        if run.step == self._last:
            tracer.stop()
            self._tracer = None

    def _write(self, run: Run, tracer: torch.profiler.profile) -> None:
        directory = run.directory / "profile"
        directory.mkdir(exist_ok=True)
        name = f"rank_{run.runtime.rank:05d}"
        _whole(directory / f"{name}.trace.json.gz", lambda path: tracer.export_chrome_trace(str(path)))
        if self._options.memory:
            _whole(directory / f"{name}.memory.pickle", _dump_history)
            torch.cuda.memory._record_memory_history(enabled=None)
        steps = f"steps {self._first} to {self._last}"
        print(f"{steps} are traced: python scripts/profile_report.py {run.directory}", flush=True)


def facts(run: Run) -> dict[str, Any]:
    """What a reader of the trace must know and the trace itself does not say."""
    config = run.config
    first, last = config.profile.steps
    everies = (config.logger.flush_every, config.evaluation.every, config.checkpoint.every)
    return {
        "first": first,
        "last": last,
        "logging": [s for s in range(first, last + 1) if any(every and s % every == 0 for every in everies)],
        "device": run.runtime.device.type,
        "rank": run.runtime.rank,
        "vocabulary": config.model.vocab_size,
        "attempt": run.attempt,
    }


def _finish_kernels(run: Run) -> None:
    if run.runtime.device.type == "cuda":
        torch.cuda.synchronize(run.runtime.device)


def _dump_history(path: Path) -> None:
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


def _whole(path: Path, write: Callable[[Path], object]) -> None:
    """A file that is complete or absent."""
    temporary = path.with_name(f".{path.name}")
    write(temporary)
    temporary.rename(path)
