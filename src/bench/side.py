"""One side of a comparison: a run that steps on request, through the loop's own step (BENCH-3)."""

from __future__ import annotations

import json
import math
import shutil
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import UntypedStorage

from src.bench.clock import time_calls
from src.bench.park import storages
from src.config import Config
from src.trainer.data.loader import Loader
from src.trainer.loop import build, collect_garbage_between_steps
from src.trainer.metrics import StepRecord, load_summary
from src.trainer.runtime import Runtime
from src.trainer.state import Run
from src.trainer.step import train_step
from src.trainer.stop import StopRequest

GIB = 1 << 30
MEMORY_STEPS = 2
"""Steps over which a peak is read, after the warm-up."""


@dataclass
class Side:
    """A run, the steps that it has made and how long they took."""

    name: str
    run: Run
    loader: Loader
    records: list[StepRecord] = field(default_factory=list)
    blocks: list[list[float]] = field(default_factory=list)
    """Milliseconds of each step of each block."""
    peak: dict[str, int] = field(default_factory=dict)
    """Bytes allocated and reserved at most during a step with the other side away; empty on a CPU."""
    state: int = 0
    """Bytes that stay allocated between steps."""

    @property
    def compiled(self) -> str:
        """What of the model is one graph: `none`, `layers` or `model`."""
        return self.run.backend.compiled

    @property
    def config(self) -> Config:
        """What the run was composed from."""
        return self.run.config

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.run.runtime.device

    def step(self) -> None:
        """One step of training."""
        record, _ = train_step(self.run, self.loader, ())
        self.records.append(record)

    def warm(self, steps: int) -> None:
        """First steps, which hold compilation and first allocations; then the peak of some warm ones."""
        for _ in range(steps):
            self.step()
        if self.device.type != "cuda":
            return
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        for _ in range(MEMORY_STEPS):
            self.step()
        torch.cuda.synchronize(self.device)
        self.peak = {
            "allocated": torch.cuda.max_memory_allocated(self.device),
            "reserved": torch.cuda.max_memory_reserved(self.device),
        }
        self.state = before

    def block(self, steps: int) -> None:
        """Steps that are timed one by one; the first of them after one that is not."""
        self.step()
        with collect_garbage_between_steps():
            self.blocks.append(time_calls(self.step, steps, self.device))

    def forget_times(self) -> None:
        """Begin another comparison."""
        self.blocks = []

    @property
    def times(self) -> list[float]:
        """Milliseconds of all timed steps."""
        return [time for block in self.blocks for time in block]

    @property
    def medians(self) -> list[float]:
        """Median of each block in milliseconds."""
        return [statistics.median(block) for block in self.blocks]

    @property
    def median(self) -> float:
        """Median of the blocks' medians in milliseconds."""
        return statistics.median(self.medians)

    def loss(self, index: int) -> float:
        """Loss of a step, counted from 0 or from the end; reads the device.

        Raises:
            ValueError: it is not finite, so that the steps after it updated nothing.
        """
        loss = float(self.records[index].sums[0].item())
        if not math.isfinite(loss):
            raise ValueError(f"{self.name}: the loss of step {self.records[index].step} is {loss}")
        return loss

    def load_max_over_mean(self) -> float | None:
        """Of the fullest expert of any layer in the last step; None where nobody counted."""
        counts, layers = self.records[-1].counts, self.run.backend.moe_layers
        if counts is None or not layers or not counts.any():  # A compiled peer counts nothing.
            return None
        ratio: float = load_summary(counts.cpu(), layers)["load_max_over_mean"]
        return ratio

    def is_packed(self) -> bool:
        """Whether samples hold several documents."""
        return self.run.data.train.micro_batch([0]).documents_BS is not None

    def kernels(self) -> dict[str, Any]:
        """What `kernels.json` says."""
        found: dict[str, Any] = json.loads((self.run.directory / "kernels.json").read_text())
        return found

    def storages(self) -> list[UntypedStorage]:
        """What stays on the device between steps."""
        return storages(self.run.backend, self.run.optimizer)


@contextmanager
def opened(config: Config, runtime: Runtime, directory: Path, name: str) -> Iterator[Side]:
    """A side whose reader thread runs while the body does."""
    shutil.rmtree(directory, ignore_errors=True)  # Against another form of the peer it was here before.
    (directory / "control").mkdir(parents=True)
    run = build(config, directory, 1, runtime, StopRequest(directory / "control"))
    with Loader(config, run.data, runtime.data_coordinate, config.mesh.data_ranks, 0) as loader:
        yield Side(name, run, loader)
