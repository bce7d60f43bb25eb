"""A run that stops, is killed or finds the disk full ends bitwise as an undisturbed one (CKPT-3, CKPT-4)."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem

from src.config import (
    BalanceConfig,
    CheckpointConfig,
    Config,
    DeterminismConfig,
    LrScheduleConfig,
    OptimizerConfig,
)
from src.errors import UserError
from src.trainer import loop as loop_module
from src.trainer.callbacks import checkpointing
from src.trainer.checkpoint import contents, save
from src.trainer.checkpoint.directory import is_complete, newest, step_path
from src.trainer.checkpoint.flat import flatten
from src.trainer.runtime import start
from src.trainer.stop import StopRequest
from tests.trainer.small import lines, run_here, small_config

TRACE = ("step", "loss", "grad_norm", "lr", "aux_loss", "tokens", "tokens_total", "samples_total", "epoch")
POINTS = [*((point, 1) for point in save.POINTS), ("item", 30), ("item", 100)]
"""The twelve places in a save at which a run is killed, each with the call that it happens at."""


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """`determinism=bitwise` is a switch of the whole process."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def exact(tmp_path: Path, steps: int, **changes: Any) -> Config:
    """A run with every state there is: two moments, lagged shares, warm-up, clipping; exact on a CPU."""
    options: dict[str, Any] = {
        "optimizer": OptimizerConfig(kind="adamw", lr=0.02, max_norm=0.3),
        "balance": BalanceConfig(kind="global_batch_lagged", coef=0.1, z_loss=0.01),
        "determinism": DeterminismConfig(name="bitwise"),
        "lr_schedule": LrScheduleConfig(kind="cosine", warmup=2, horizon=steps),
        "max_steps": steps,
    }
    return small_config(tmp_path, **(options | changes))


def trace(directory: Path) -> list[tuple[Any, ...]]:
    return [tuple(line[key] for key in TRACE) for line in lines(directory)]


def state(directory: Path, step: int) -> dict[str, Tensor]:
    """Everything that was saved: parameters, moments, shares."""
    out = directory / "flat.safetensors"
    flatten(step_path(directory, step), out)
    return load_file(out)


def is_same(one: Path, two: Path, step: int) -> bool:
    """Whether two runs have the same history and the same state after a step, to the bit."""
    a, b = state(one, step), state(two, step)
    equal = a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    return equal and trace(one) == trace(two)


@pytest.mark.slow
def test_eight_and_eight_steps_equal_sixteen_bitwise_ckpt_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CKPT-3, ORDER-2: loss, norm, rate, weights, moments and shares; a part that starts anew is noticed."""
    config, straight, half = exact(tmp_path, 16), tmp_path / "straight", tmp_path / "half"
    run_here(config, straight)
    found = set(state(straight, 16))
    assert {f"model.norm.weight{end}" for end in ("", "::exp_avg", "::exp_avg_sq")} < found
    assert "extra.balance.load.1" in found
    assert len({line[3] for line in trace(straight)}) > 8, "the learning rate moves"
    assert run_here(config, half, stop_after=7)
    for part, lost in LOST.items():
        run = shutil.copytree(half, tmp_path / part)
        with monkeypatch.context() as patch:
            patch.setattr(loop_module, "load", functools.partial(load_without, loop_module.load, lost))
            run_here(config, run, attempt=2)
        assert is_same(run, straight, 16) is (part == "nothing"), part
        assert [line["attempt"] for line in lines(run)] == [1] * 8 + [2] * 8


LOST: dict[str, Callable[[Any, Any], list[Tensor]]] = {
    "nothing": lambda backend, moments: [],
    "moments": lambda backend, moments: [t for by_name in moments.values() for t in by_name.values()],
    "shares": lambda backend, moments: list(backend.extra_state().values()),
}
"""Mutations: what a load leaves at its start."""


def load_without(
    load: Any, lost: Any, found: Any, config: Any, backend: Any, moments: Any, *rest: Any
) -> Any:
    """Load, then put back what was there before."""
    kept = [(tensor, tensor.clone()) for tensor in lost(backend, moments)]
    scalars = load(found, config, backend, moments, *rest)
    for tensor, before in kept:
        tensor.copy_(before)
    return scalars


def test_numbers_of_the_optimizer_come_from_the_config_ckpt_3(tmp_path: Path) -> None:
    """CKPT-3: another rate, decay and clip hold from the resumed step on, whatever the first half had."""
    config = exact(tmp_path, 4, lr_schedule=LrScheduleConfig(kind="constant", warmup=0))
    changed = replace(config, optimizer=replace(config.optimizer, lr=0.005, weight_decay=0.3, max_norm=None))
    assert run_here(config, tmp_path / "a", stop_after=1)
    run_here(changed, tmp_path / "a", attempt=2)
    assert [line["lr"] for line in lines(tmp_path / "a")][2:] == [0.005, 0.005]


def test_a_constant_rate_goes_on_with_more_steps_ckpt_3(tmp_path: Path) -> None:
    """CKPT-3, CFG-19: without a horizon a larger `max_steps` continues the same curve, bitwise."""
    config = exact(tmp_path, 6, lr_schedule=LrScheduleConfig(kind="constant", warmup=2))
    run_here(config, tmp_path / "long")
    run_here(replace(config, max_steps=3), tmp_path / "parts")
    run_here(config, tmp_path / "parts", attempt=2)
    assert is_same(tmp_path / "long", tmp_path / "parts", 6)


def saving_often(tmp_path: Path, every: int = 2, steps: int = 6) -> Config:
    """A run that is saved again and again."""
    return exact(tmp_path, steps, checkpoint=CheckpointConfig(every=every, keep_last=2))


def killer(point: str, nth: int, step: int) -> Callable[..., Path]:
    """`save` that ends the process at the n-th call of a point, in the save of `step`."""
    calls = itertools.count(1)

    def save_and_die(**keywords: Any) -> Path:
        def hook(at: str) -> None:
            if keywords["step"] == step and at == point and next(calls) == nth:
                os.kill(os.getpid(), signal.SIGKILL)

        return save.save(hook=hook, **keywords)

    return save_and_die


def die_at_points(tmp_path: Path, points: list[tuple[str, int]]) -> None:
    """In a child: fork once per point, train, and die in the second save."""
    for index, (point, nth) in enumerate(points):
        child = os.fork()
        if child == 0:
            checkpointing.save = killer(point, nth, 4)  # type: ignore[assignment]
            run_here(saving_often(tmp_path), tmp_path / str(index))
            os._exit(7)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, (point, status)


def forkserver() -> ForkServerContext:
    """Processes that have imported this module's torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.trainer.small"])
    return context


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_run_killed_at_any_point_of_a_save_ends_as_undisturbed_ckpt_4(tmp_path: Path, first: int) -> None:
    """CKPT-4: `kill -9` at every second of twelve points; the next start takes the newest complete step."""
    points = POINTS[first::2]
    process = forkserver().Process(target=die_at_points, args=(tmp_path, points))
    process.start()
    process.join(250)
    assert process.exitcode == 0
    run_here(saving_often(tmp_path), tmp_path / "undisturbed")
    for index, (point, _) in enumerate(points):
        run = tmp_path / str(index)
        found = newest(run)
        published = save.POINTS.index(point) >= save.POINTS.index("published")
        assert found == step_path(run, 4 if published else 2), point
        run_here(saving_often(tmp_path), run, attempt=2)
        firsts = [line["step"] for line in lines(run) if line["attempt"] == 2]
        assert firsts[0] == (5 if published else 3), point
        assert is_same(run, tmp_path / "undisturbed", 6), point
        names = sorted(path.name for path in (run / "checkpoints").iterdir())
        assert names == ["step-00000004", "step-00000006"], point


def train_here(tmp_path: Path, name: str, attempt: int, steps: int) -> None:
    """A start of the run that random kills meet."""
    run_here(saving_often(tmp_path, every=1, steps=steps), tmp_path / name, attempt)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.soak)])
def test_a_run_killed_at_random_times_ends_as_undisturbed_ckpt_4(tmp_path: Path, kills: int) -> None:
    """CKPT-4: killed again and again while it saves after each step, it goes on each time."""
    context, delays, whole = forkserver(), random.Random(kills), 12 + 4 * kills
    steps = []
    for attempt in range(1, kills + 1):
        process = context.Process(target=train_here, args=(tmp_path, "killed", attempt, whole))
        process.start()
        begun = steps[-1] if steps else 0
        while process.is_alive() and last_step(tmp_path / "killed") <= begun + 1:
            time.sleep(0.01)
        time.sleep(delays.random() * 0.1)
        process.kill()
        process.join()
        found = newest(tmp_path / "killed")
        assert found is not None
        assert all(is_complete(path) for path in found.parent.glob("step-*"))
        steps.append(int(found.name.removeprefix("step-")))
    assert steps == sorted(steps)
    assert steps[-1] < whole, "the run was done before it was killed often enough"
    for name in ("killed", "undisturbed"):
        train_here(tmp_path, name, kills + 1, whole)
    assert is_same(tmp_path / "killed", tmp_path / "undisturbed", whole)


def stop_here(tmp_path: Path, attempt: int, steps: int) -> None:
    """A start of the run that is asked to stop; it saves then and at its end only."""
    config, run = saving_often(tmp_path, every=0, steps=steps), tmp_path / "stopped"
    (run / "control").mkdir(parents=True, exist_ok=True)
    runtime = start(config)
    stopped = loop_module.train(config, run, attempt, runtime, StopRequest(run / "control").install())
    runtime.close()
    os._exit(75 if stopped else 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("asks", [3, pytest.param(50, marks=pytest.mark.soak)])
def test_a_run_stopped_at_random_times_saves_each_time(tmp_path: Path, asks: int) -> None:
    """AGENT-2, CKPT-3: after random delays the step under way is ended and saved; each step comes once."""
    context, delays, whole = forkserver(), random.Random(asks), 20 * asks
    run = tmp_path / "stopped"
    for attempt in range(1, asks + 1):
        process = context.Process(target=stop_here, args=(tmp_path, attempt, whole))
        process.start()
        while process.is_alive() and not any(line["attempt"] == attempt for line in recorded(run)):
            time.sleep(0.01)
        time.sleep(delays.random() * 0.05)
        assert process.pid is not None
        os.kill(process.pid, delays.choice([signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM]))
        process.join(60)
        assert process.exitcode == 75, "the run was done before it was asked to stop often enough"
        found = newest(run)
        assert found == step_path(run, lines(run)[-1]["step"])
        assert is_complete(found)
    run_here(saving_often(tmp_path, every=0, steps=whole), run, asks + 1)
    run_here(saving_often(tmp_path, every=0, steps=whole), tmp_path / "undisturbed")
    assert [line["step"] for line in recorded(run)] == list(range(1, whole + 1))
    assert is_same(run, tmp_path / "undisturbed", whole)


def recorded(run: Path) -> list[dict[str, Any]]:
    """Every whole line of the metrics so far."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def last_step(run: Path) -> int:
    """Newest step that is there, complete or not; 0 without one."""
    found = sorted((run / "checkpoints").glob("step-*")) if run.is_dir() else []
    return int(found[-1].name.removeprefix("step-")) if found else 0


class FullDisk:
    """A file on a disk with room for some bytes more."""

    def __init__(self, file: BinaryIO, room: int) -> None:
        self._file, self._room = file, room

    def write(self, data: Any) -> int:
        self._room -= memoryview(data).nbytes
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize(
    "room", [5_000, pytest.param(0, marks=pytest.mark.slow), pytest.param(200_000, marks=pytest.mark.slow)]
)
def test_a_full_disk_ends_the_run_and_leaves_older_checkpoints_ckpt_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """CKPT-4: one error with step, reason and fix; with room again the run ends as undisturbed."""
    config, run = saving_often(tmp_path), tmp_path / "run"
    create = FileSystem.create_stream

    @contextmanager
    def create_stream(system: Any, path: Any, mode: str) -> Iterator[Any]:
        with create(system, path, mode) as stream:
            yield FullDisk(stream, room) if "step-00000004" in str(path) and "w" in mode else stream

    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "create_stream", create_stream)
        with pytest.raises(UserError) as full:
            run_here(config, run)
    assert full.value.code == 1
    assert f"{step_path(run, 4)} could not be written: No space left on device" in str(full.value)
    assert "checkpoint.keep_last=1" in str(full.value)
    assert os.listdir(run / "checkpoints") == ["step-00000002"]
    assert newest(run) == step_path(run, 2)
    run_here(config, run, attempt=2)
    run_here(config, tmp_path / "undisturbed")
    assert is_same(run, tmp_path / "undisturbed", 6)


def test_what_is_saved_has_a_name_ckpt_1(tmp_path: Path) -> None:
    """CKPT-1: moments by the name of their parameter, for every parameter; nothing else is in the file."""
    run_here(exact(tmp_path, 1), tmp_path / "run")
    found = state(tmp_path / "run", 1)
    parameters = {name for name in found if contents.is_weight(name)}
    moments = {contents.moment_name(name, m) for name in parameters for m in ("exp_avg", "exp_avg_sq")}
    shares = {f"extra.balance.load.{layer}" for layer in (1, 2)}
    assert set(found) == parameters | moments | shares
