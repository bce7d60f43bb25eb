"""Saving: contents, one rename, and what a process that dies or fails leaves behind (CKPT-1, CKPT-4)."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from src.errors import UserError
from src.trainer.checkpoint.directory import newest
from src.trainer.checkpoint.find import find
from src.trainer.checkpoint.load import load
from src.trainer.checkpoint.retention import retain
from src.trainer.checkpoint.save import POINTS, save
from tests.checkpoint.fake import MOMENTS, Fake, alone, canonical, config, fill, value, wrong


def save_step(
    run: Path, step: int, hook: Callable[[str], None] = lambda point: None, attempt: int = 1
) -> Path:
    """Save the fake's values times the step."""
    fake = Fake()
    moments = fake.moments()
    fill(fake, moments, step)
    scalars = {"step": step, "tokens_total": 3 * step}
    return save(config(), run, attempt, step, fake, moments, scalars, alone(), "key", hook)


def load_newest(run: Path) -> int:
    """The step that a new start takes, all of its values checked."""
    fake = Fake()
    moments = fake.moments()
    found = find(config(), run, alone(), fake)
    assert found is not None
    scalars = load(found, config(), fake, moments, alone(), "key")
    assert scalars == {"step": found.step, "tokens_total": 3 * found.step}
    assert wrong(fake, moments, found.step) == []
    return found.step


def test_contents_ckpt_1(tmp_path: Path) -> None:
    """CKPT-1: one entry per expert and projection, moments by name, and metadata that says what is there."""
    path = save_step(tmp_path, 200)
    assert path == tmp_path / "checkpoints" / "step-00000200"
    meta = json.loads((path / "meta.json").read_text())
    expected = {name: list(shape) for name, shape in canonical().items()}
    expected |= {f"{name}::{m}": shape for name, shape in list(expected.items()) for m in MOMENTS}
    expected["extra.balance.load.1"] = [6]
    assert {name: t["shape"] for name, t in meta["tensors"].items()} == expected
    assert {t["dtype"] for t in meta["tensors"].values()} == {"float32"}
    assert (meta["format"], meta["step"], meta["data_key"]) == (1, 200, "key")
    assert set(meta["files"]) == {p.name for p in path.iterdir()} - {"meta.json"}
    assert load_newest(tmp_path) == 200


def test_every_point_is_reached_in_order(tmp_path: Path) -> None:
    """The kill and failure tests below stand on this."""
    seen: list[str] = []
    save_step(tmp_path, 200, seen.append)
    assert list(dict.fromkeys(seen)) == list(POINTS)
    assert seen.count("item") == len(canonical()) * 3 + 1


def _kill_at_points(run: Path, points: list[tuple[str, int]]) -> None:
    """In a child: fork once per point, save step 300 there and die at the n-th call of that point."""
    save_step(run / "base", 200)
    for index, (point, nth) in enumerate(points):
        directory = shutil.copytree(run / "base", run / str(index))
        child = os.fork()
        if child == 0:
            save_step(directory, 300, _killer(point, nth))
            os._exit(7)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, (point, status)


def _killer(point: str, nth: int) -> Callable[[str], None]:
    calls = itertools.count(1)

    def hook(at: str) -> None:
        if at == point and next(calls) == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


@pytest.mark.slow
def test_kill_at_any_point_ckpt_4(tmp_path: Path) -> None:
    """CKPT-4: whenever the saving process is killed, the next start finds a complete step, bitwise."""
    points = [(point, 1) for point in POINTS] + [("item", 30), ("item", 100)]
    process = multiprocessing.get_context("forkserver").Process(
        target=_kill_at_points, args=(tmp_path, points)
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0
    for index, (point, _) in enumerate(points):
        run = tmp_path / str(index)
        published = POINTS.index(point) >= POINTS.index("published")
        assert load_newest(run) == (300 if published else 200), point
        save_step(run, 400, attempt=2)
        retain(config(), run, protect=400)
        assert load_newest(run) == 400
        assert not [p for p in (run / "checkpoints").iterdir() if p.name.startswith(".")], point


@pytest.mark.parametrize("point", ["staged", "item", "written", "hashed", "meta", "whole", "aside"])
def test_failure_at_any_point_ckpt_4(tmp_path: Path, point: str) -> None:
    """CKPT-4: a save that raises publishes nothing, and trying the same step again works."""
    save_step(tmp_path, 200)

    def fail(at: str) -> None:
        if at == point:
            raise OSError("disk full")

    with pytest.raises(UserError, match="disk full"):
        save_step(tmp_path, 300, fail)
    assert load_newest(tmp_path) == 200
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000200"]
    save_step(tmp_path, 300)
    assert load_newest(tmp_path) == 300


def test_same_step_again_takes_its_place(tmp_path: Path) -> None:
    """A damaged step, or one of a branch left behind, does not stop the same step from being saved."""
    path = save_step(tmp_path, 200)
    (path / "__0_0.distcp").write_bytes(b"")
    assert newest(tmp_path) is None
    save_step(tmp_path, 200, attempt=2)
    assert load_newest(tmp_path) == 200
    assert (tmp_path / "checkpoints" / ".old-step-00000200-2" / "meta.json").exists()


def _save_for_ever(run: Path, seed: int) -> None:
    for step in range(200, 10**6, 200):
        save_step(run, step, attempt=seed)
        retain(config(), run, protect=step)


@pytest.mark.slow
def test_kill_at_random_times_ckpt_4(tmp_path: Path) -> None:
    """CKPT-4: ten kills at random times of a process that saves and deletes without pause."""
    context, delays = multiprocessing.get_context("forkserver"), random.Random(7)
    save_step(tmp_path, 0)
    for attempt in range(10):
        process = context.Process(target=_save_for_ever, args=(tmp_path, attempt))
        process.start()
        time.sleep(0.5 + delays.random())
        process.kill()
        process.join()
        assert load_newest(tmp_path) % 200 == 0


def test_values_are_functions_of_names() -> None:
    """The fake's law: no two names share a value, so a mix-up cannot pass."""
    names = [(n + s, shape) for n, shape in canonical().items() for s in ("", *(f"::{m}" for m in MOMENTS))]
    assert len({value(n, shape).flatten()[0].item() for n, shape in names}) == len(names)
