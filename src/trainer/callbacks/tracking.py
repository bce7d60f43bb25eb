"""wandb and TensorBoard, off the step path (TRACK-1, TRACK-2).

Only global rank 0 makes this callback. All calls into a tracker happen in one daemon thread behind a bounded
queue: a tracker that raises, hangs or sleeps neither stops nor slows training. The first failure is one
warning, what the queue cannot take is counted, and the end waits a limited time.
"""

from __future__ import annotations

import hashlib
import netrc
import os
import queue
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from src.compose import flatten
from src.trainer.callbacks.base import Callback
from src.trainer.state import Run

QUEUE_SIZE = 4096
FINISH_SECONDS = 30.0
DROPPED_KEYS = ("schema", "step", "time", "moe", "bubble_s")


class Tracker(Protocol):
    """What a tracking service must do; each call runs in the tracking thread."""

    def init(self, config: dict[str, Any]) -> None:
        """Open the tracker with the plain resolved config."""
        ...

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Record numbers and texts of a step."""
        ...

    def finish(self) -> None:
        """Close the tracker."""
        ...


class Wandb:
    """Weights & Biases; offline without a key or a network."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._wandb: Any = None

    def init(self, config: dict[str, Any]) -> None:
        import wandb

        run = self._run
        directory = run.directory / "tracking"
        directory.mkdir(exist_ok=True)
        options: dict[str, Any] = {
            "project": run.config.logger.project,
            "name": run.directory.name,
            "group": run.directory.parent.name if run.config.sweep.job else None,
            "id": run_id(run.directory),
            "resume": "allow",
            "dir": str(directory),
            "config": config,
            "tags": [f"{k}:{v}" for k, v in run.config.logger.tags.items()],
        }
        if not _has_key():
            self._wandb = wandb.init(mode="offline", **options)
            return
        try:
            self._wandb = wandb.init(**options)
        except wandb.errors.CommError:
            self._wandb = wandb.init(mode="offline", **options)

    def log(self, step: int, values: dict[str, Any]) -> None:
        self._wandb.log(values, step=step)

    def finish(self) -> None:
        self._wandb.finish()


class Tensorboard:
    """TensorBoard event files in `RUN/tracking/tensorboard`."""

    def __init__(self, run: Run) -> None:
        self._directory = run.directory / "tracking" / "tensorboard"
        self._writer: Any = None

    def init(self, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._directory))
        self._writer.add_text("config", "\n".join(f"    {k}: {v}" for k, v in config.items()))

    def log(self, step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
            add(name, value, step)

    def finish(self) -> None:
        self._writer.close()


TRACKERS: dict[str, Callable[[Run], Tracker]] = {"wandb": Wandb, "tensorboard": Tensorboard}


class Tracking(Callback):
    """Feeds one tracker from its own thread."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._queue: queue.Queue[tuple[int, dict[str, Any]] | None] = queue.Queue(QUEUE_SIZE)
        self._thread: threading.Thread | None = None
        self._dropped = 0

    def start(self, run: Run) -> None:
        config = flatten(run.config) | {"data_key": run.data.key}
        self._thread = threading.Thread(target=self._work, args=(config,), daemon=True, name=self._name)
        self._thread.start()

    def _work(self, config: dict[str, Any]) -> None:
        """Open, log until the end mark, close: at the first failure the tracker is given up."""
        try:
            self._tracker.init(config)
            try:
                while (item := self._queue.get()) is not None:
                    self._tracker.log(*item)
            finally:
                self._tracker.finish()
        except Exception as error:
            print(f"warning: {self._name} is off for this run: {type(error).__name__}: {error}", flush=True)

    def metrics(self, run: Run, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            self._put(line["step"], dict(_numbers(line)))

    def evaluated(self, run: Run, record: dict[str, Any], samples: list[dict[str, Any]]) -> None:
        values: dict[str, Any] = {
            f"heldout/{k}": v for k, v in record.items() if v is not None and k != "step"
        }
        for number, sample in enumerate(samples):
            values[f"sample/{number}/{sample['mode']}"] = sample["prompt"] + sample["text"]
        self._put(record["step"], values)

    def _put(self, step: int, values: dict[str, Any]) -> None:
        try:
            self._queue.put_nowait((step, values))
        except queue.Full:
            self._dropped += 1

    def close(self, run: Run) -> None:
        if self._thread is None:
            return
        try:
            self._queue.put(None, timeout=1.0)
        except queue.Full:
            self._dropped += 1
        self._thread.join(FINISH_SECONDS)
        if self._thread.is_alive():
            print(
                f"warning: {self._name} did not finish in {FINISH_SECONDS:.0f} s and is left behind",
                flush=True,
            )
        if self._dropped:
            print(
                f"warning: {self._name} could not keep up, {self._dropped} records were dropped", flush=True
            )


def trackers(run: Run) -> Iterable[Tracking]:
    """The trackers that `logger.kinds` names; none on ranks other than the first."""
    if run.runtime.rank == 0:
        for name in run.config.logger.kinds:
            yield Tracking(name, TRACKERS[name](run))


def run_id(directory: Path) -> str:
    """The tracker's id of a run: a hash of sweep and run name, so that a resume keeps it (TRACK-2)."""
    return hashlib.sha256(f"{directory.parent.name}/{directory.name}".encode()).hexdigest()[:16]


def _numbers(line: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    for key, value in line.items():
        if key not in DROPPED_KEYS and isinstance(value, int | float):
            yield f"train/{key}", value
    moe = line["moe"]
    if moe is not None:
        yield "moe/load_entropy", moe["load_entropy"]
        yield "moe/load_max_over_mean", moe["load_max_over_mean"]
        if moe["bias_max"] is not None:
            yield "moe/bias_max", moe["bias_max"]
        for layer, load in moe["layers"].items():
            yield f"moe/layer_{layer}/max_over_mean", load["max_over_mean"]


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False
