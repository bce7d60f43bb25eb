"""The training loop that every backend, mesh and launcher shares.

Read it top to bottom: build the run, take up the newest checkpoint, then step until `max_steps` or until
somebody asks to stop. Everything optional is a callback.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from src.config import Config
from src.errors import UserError
from src.trainer.backends.registry import backend_class
from src.trainer.callbacks.base import Callback
from src.trainer.callbacks.checkpointing import Checkpointing
from src.trainer.callbacks.dump_batches import DumpBatches
from src.trainer.callbacks.evaluating import Evaluating
from src.trainer.callbacks.profiling import Profiling
from src.trainer.callbacks.steady import SteadyTimeouts
from src.trainer.callbacks.tracking import trackers
from src.trainer.checkpoint.agree import agree
from src.trainer.checkpoint.find import find
from src.trainer.checkpoint.load import load
from src.trainer.checkpoint.weights import load_weights
from src.trainer.data.corpus import open_data
from src.trainer.data.keys import data_key
from src.trainer.data.loader import Loader
from src.trainer.data.order import Order
from src.trainer.health import Health, refusal
from src.trainer.kernels_record import write_kernels
from src.trainer.metrics import Metrics
from src.trainer.optimizer import Optimizer
from src.trainer.parallel.precision import precision_of
from src.trainer.repairs import repair
from src.trainer.runtime import Runtime
from src.trainer.state import Run
from src.trainer.step import train_step
from src.trainer.stop import StopRequest
from src.trainer.tuning import tune_products

SHOWN = 8
"""Samples that a message names."""


def train(config: Config, directory: Path, attempt: int, runtime: Runtime, stop: StopRequest) -> bool:
    """Train to the end; True if the run was stopped on request before it, with its state saved.

    Raises:
        UserError: resume refused (8), loss or gradient not finite (7), a kernel missing (3).
    """
    run = build(config, directory, attempt, runtime, stop)
    take_up(run)
    metrics, callbacks = Metrics(run), make_callbacks(run)
    coordinates = config.mesh.data_ranks
    with (
        closing(run, callbacks),
        Loader(config, run.data, runtime.data_coordinate, coordinates, run.step) as loader,
    ):
        for callback in callbacks:
            callback.start(run)
        stopped = run_steps(run, loader, metrics, callbacks)
        for callback in callbacks:
            callback.end(run, stopped)
    return stopped


def run_steps(run: Run, loader: Loader, metrics: Metrics, callbacks: Sequence[Callback]) -> bool:
    """Step until `max_steps`; True if all ranks agreed to stop before."""
    stopped = False
    with collect_garbage_between_steps():
        while run.step < run.config.max_steps and not stopped:
            record, stop = train_step(run, loader, callbacks)
            metrics.add(record)
            stopped = stop and run.step < run.config.max_steps
            if stopped or run.step % run.config.logger.flush_every == 0 or must_flush(run):
                flush(run, metrics, callbacks)
            for callback in callbacks:
                callback.step(run)
    return stopped


def must_flush(run: Run) -> bool:
    """Metrics are written before the last step's, an evaluation's or a checkpoint's own files are (LOG-3)."""
    everies = (run.config.evaluation.every, run.config.checkpoint.every)
    return run.step == run.config.max_steps or any(every and run.step % every == 0 for every in everies)


def flush(run: Run, metrics: Metrics, callbacks: Sequence[Callback]) -> None:
    """Write the metrics since the last flush; end the run if one is not finite or had no target."""
    lines = metrics.flush()
    for callback in callbacks:
        callback.metrics(run, lines)
    if metrics.empty_steps:
        raise without_targets(run, metrics.empty_steps[0])
    if bool(run.health.halted.item()):
        raise refusal(run.config, lines)


def without_targets(run: Run, step: int) -> UserError:
    """The refusal of a step in whose global batch no token has a next one to predict (EVAL-4)."""
    order, size = Order(run.config, len(run.data.train)), run.config.global_batch_size
    samples = [order.at((step - 1) * size + slot).sample for slot in range(size)]
    named = ", ".join(map(str, samples[:SHOWN])) + (f" and {size - SHOWN} more" if size > SHOWN else "")
    return UserError(
        f"no target in the whole batch of step {step}, samples {named} of {run.data.train.source.name}; "
        "a larger global_batch_size, or data without such documents",
        code=4,
    )


def build(config: Config, directory: Path, attempt: int, runtime: Runtime, stop: StopRequest) -> Run:
    """Data, backend and optimizer of this rank; one line tells what the run is made of (LOG-4)."""
    data = open_data(config, agree(runtime, lambda: launched_key(config, directory)))
    tuned, lines = tune_products(config, runtime.device)
    backend = backend_class(config.backend.name).build(config, runtime)
    optimizer = Optimizer(
        config.optimizer, backend.parameters, backend.specs, backend.ops.adamw, backend.copies,
        backend.remainders, precision_of(config, runtime.device).first_moment,
    )  # fmt: skip
    repairs = repair(config, directory, runtime.rank, backend.ops)
    write_kernels(directory, runtime, backend.ops_record() | repairs.record | tuned)
    health = Health(config, runtime.device)
    run = Run(config, directory, attempt, runtime, data, backend, optimizer, stop, health, repairs)
    for line in [*lines, *repairs.lines]:
        say(run, line)
    return run


def launched_key(config: Config, directory: Path) -> str | None:
    """The data key that the launching process wrote; computed where a rank was started by other means."""
    path = directory / "code.json"
    if not path.exists():
        return data_key(config)
    key: str | None = json.loads(path.read_text())["data_key"]
    return key


def take_up(run: Run) -> None:
    """Load the newest complete checkpoint, or the weights of `init_from`, or keep the initial weights."""
    found = find(run.config, run.directory, run.runtime, run.backend)
    if found is not None:
        for note in found.skipped:
            say(run, note)
        scalars = load(found, run.config, run.backend, run.optimizer.moments, run.runtime, run.data.key)
        run.step, run.tokens_total = int(scalars["step"]), int(scalars["tokens_total"])
        run.optimizer.updates = int(scalars["updates"])
        run.health.load(scalars)
        say(run, f"goes on from step {run.step}")
    elif run.config.init_from is not None:
        initial = load_weights(run.config, run.backend, run.runtime)
        say(
            run,
            f"weights from {run.config.init_from}"
            + (f"; initial stay: {', '.join(initial)}" if initial else ""),
        )


def say(run: Run, text: str) -> None:
    """A line on the console, once for all ranks."""
    if run.runtime.rank == 0:
        print(text, flush=True)


def make_callbacks(run: Run) -> list[Callback]:
    """The callbacks that the config asks for, in the order in which they are called."""
    tracking = list(trackers(run))
    dump = [DumpBatches()] if run.config.debug.dump_batches else []
    listeners = [*tracking, *dump]
    evaluating = [Evaluating(listeners)] if run.config.evaluation.name == "heldout" else []
    steady = [SteadyTimeouts()] if run.runtime.world > 1 else []
    profile = run.config.profile
    traces = bool(profile.steps) and run.runtime.rank in (profile.ranks or range(run.runtime.world))
    profiling = [Profiling(run.config, run.runtime.device)] if traces else []
    return [*steady, *listeners, *evaluating, Checkpointing(), *profiling]


@contextmanager
def closing(run: Run, callbacks: Sequence[Callback]) -> Iterator[None]:
    """Close every callback on every way out, and undo the patches."""
    try:
        yield
    finally:
        for callback in callbacks:
            callback.close(run)
        run.repairs.close()


@contextmanager
def collect_garbage_between_steps() -> Iterator[None]:
    """Freeze what the start left behind, so that collections during training have little to look at."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
