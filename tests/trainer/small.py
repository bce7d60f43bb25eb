"""A run of the odd model on synthetic data, trained in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from src.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    LrScheduleConfig,
    OptimizerConfig,
    PathsConfig,
    PrecisionConfig,
    TokenizerConfig,
)
from src.trainer.backends.native import NativeBackend
from src.trainer.loop import train
from src.trainer.runtime import start
from src.trainer.stop import StopRequest
from tests.models.odd import deepseek_v2


def small_config(tmp_path: Path, **changes: Any) -> Config:
    """Six steps of three samples of 20 positions, in fp32 with SGD."""
    options: dict[str, Any] = {
        "model": deepseek_v2(),
        "data": DataConfig(kind="synthetic", rule="zipf", ids=97, documents=41),
        "tokenizer": TokenizerConfig(kind="none"),
        "optimizer": OptimizerConfig(kind="sgd", lr=0.3, weight_decay=0.0),
        "lr_schedule": LrScheduleConfig(kind="cosine", warmup=2),
        "precision": PrecisionConfig(name="fp32"),
        "checkpoint": CheckpointConfig(every=0),
        "evaluation": EvaluationConfig(name="none"),
        "paths": PathsConfig(runs=str(tmp_path / "runs"), data=str(tmp_path / "data")),
        "sequence_length": 20,
        "global_batch_size": 3,
        "micro_batch_size": 1,
        "max_steps": 6,
    }
    return Config(**(options | changes))


class StopAt(StopRequest):
    """Asks to stop once the loop has looked `looks` times."""

    def __init__(self, control: Path, looks: int) -> None:
        super().__init__(control)
        self._left = looks

    def asked(self) -> bool:
        self._left -= 1
        return self._left < 0


def poison(monkeypatch: pytest.MonkeyPatch, bad: Mapping[int, tuple[float, float]]) -> None:
    """Add to norm and loss of some steps, counted from 0 as `Run.step` before them; steps run in order."""
    steps = count()
    honest = NativeBackend.norm_and_loss

    def poisoned(backend: NativeBackend, loss: Tensor) -> tuple[Tensor, Tensor]:
        norm, whole = honest(backend, loss)
        more, extra = bad.get(next(steps), (0.0, 0.0))
        return norm + more, whole + extra

    monkeypatch.setattr(NativeBackend, "norm_and_loss", poisoned)


def run_here(config: Config, directory: Path, attempt: int = 1, stop_after: int = 10**9) -> bool:
    """Train in this process, as rank 0 of 1; True if it was stopped."""
    (directory / "control").mkdir(parents=True, exist_ok=True)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    runtime = start(config)
    try:
        return train(config, directory, attempt, runtime, StopAt(directory / "control", stop_after))
    finally:
        runtime.close()


def lines(directory: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; for metrics the last line of each step."""
    objects = [json.loads(line) for line in (directory / name).read_text().splitlines()]
    return list({o["step"]: o for o in objects}.values()) if name == "metrics.jsonl" else objects
