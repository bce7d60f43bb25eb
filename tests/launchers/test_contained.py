"""Launches in containers: fakes of docker and apptainer around ranks that train nothing (CONT, FAKE)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from src.code_identity import CHECKOUT
from src.compose import compose
from src.errors import UserError
from src.launchers import contained
from src.launchers.container import container_plan
from tests.launchers.conftest import Start
from tests.launchers.test_launch import out, step_of, wait_for

FAKES = CHECKOUT / "tests" / "fakes" / "bin"
SLOW = partial(pytest.param, marks=pytest.mark.slow)
SECRET = "wk_" + "w" * 30


@pytest.fixture
def boxed(start: Start, tmp_path: Path) -> Any:
    """Start a launch in a fake container whose records lie in `tmp_path/fakes`."""

    def begin(name: str, *overrides: str, **environment: str) -> subprocess.Popen[str]:
        words = [f"container={name}", "container.image=lab/torch:2", f"container.python={sys.executable}"]
        path = f"{FAKES}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        places = {"PATH": path, "FAKE_RUNTIMES": f"{tmp_path}/fakes", "WANDB_API_KEY": SECRET}
        given = ["container.env=[FAKE_*]", "run_name=one", f"paths.cache={tmp_path}/cache", "max_steps=3"]
        return start("launching", *words, *given, *overrides, **places, **environment)

    return begin


def calls(tmp_path: Path, key: str) -> list[Any]:
    lines = (tmp_path / "fakes" / "calls.jsonl").read_text().splitlines()
    return [record[key] for record in map(json.loads, lines) if key in record]


def status(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "runs/one/status.json").read_text())


def test_docker(boxed: Any, tmp_path: Path) -> None:
    """CONT-1, CONT-2: variables by name, no others; digest in the plan, the rank's code, no secret."""
    code, text = out(boxed("docker", FAKE_FAIL="0:exit42@2", OTHER="1"))
    assert (code, status(tmp_path)["exit_code"]) == (42, 42), text
    (names,) = calls(tmp_path, "payload")
    assert {"WANDB_API_KEY", "FAKE_FAIL", "FROM_IMAGE", "HOME"} < set(names)
    assert not {"OTHER", "FAKE_RUNTIMES_", "OMP_NUM_THREADS"} & set(names)
    plan = json.loads((tmp_path / "runs/one/plan.json").read_text())
    assert plan["container"]["digest"] == "sha256:" + "7" * 64
    found = [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert found == []
    assert SECRET not in text
    verbs = [words[0] for words in calls(tmp_path, "argv")]
    assert verbs == ["ps", "image", "pull", "image", "run", "ps"]


@pytest.mark.slow
def test_apptainer(boxed: Any, tmp_path: Path) -> None:
    """CONT-1: a run to its end, its variables told by name; no secret in argv."""
    code, text = out(boxed("apptainer"))
    assert (code, status(tmp_path)["state"]) == (0, "done"), text
    (words,) = calls(tmp_path, "argv")
    assert SECRET not in json.dumps(words)
    assert "WANDB_API_KEY" in calls(tmp_path, "payload")[0]


@pytest.mark.slow
def test_sigterm_saves(boxed: Any, tmp_path: Path) -> None:
    """CONT-2, LOCAL-2: a stop request passes; the same command goes on as the next attempt."""
    process = boxed("docker", "max_steps=400", FAKE_SLEEP="0.05")
    wait_for(lambda: step_of(tmp_path) >= 2)
    for pid in agents(tmp_path):  # As a scheduler does that signals every process of a job, again and again.
        for _ in range(3):
            os.kill(pid, signal.SIGTERM)
            time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert out(process)[0] == 75
    names = [word for words in calls(tmp_path, "argv") for word in words if word.startswith("--name")]
    assert names[0].startswith("--name=manyhead-local-")
    assert names[0].endswith("-0-1")


def agents(tmp_path: Path) -> list[int]:
    """Process ids of payloads, which are the agents inside."""
    return [json.loads(path.read_text())["pid"] for path in (tmp_path / "fakes").glob("manyhead-*")]


def rank_of(tmp_path: Path) -> int:
    return int((tmp_path / "runs/one/ranks/rank_00000.log").read_text().split()[3])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_kill_leaves_no_orphan(boxed: Any, tmp_path: Path) -> None:
    """LOCAL-2: a killed launching process takes the container along, though a daemon runs it."""
    process = boxed("docker", "max_steps=4000", FAKE_SLEEP="0.05")
    wait_for(lambda: step_of(tmp_path) >= 1)
    rank = rank_of(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    started = time.monotonic()
    wait_for(lambda: not is_alive(rank), 10.0)
    assert time.monotonic() - started < 10.0


@pytest.mark.slow
def test_mutation_without_the_hosts_pipe_there_is_an_orphan(boxed: Any, tmp_path: Path) -> None:
    """LOCAL-2: an agent whose standard input never ends outlives the launching process."""
    deaf = tmp_path / "deaf"
    os.mkfifo(tmp_path / "open")
    deaf.write_text(f'#!/bin/sh\nexec {sys.executable} "$@" <>{tmp_path}/open\n')
    deaf.chmod(0o755)
    process = boxed("docker", "max_steps=4000", f"container.python={deaf}", FAKE_SLEEP="0.05")
    wait_for(lambda: step_of(tmp_path) >= 1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    step = step_of(tmp_path)
    wait_for(lambda: step_of(tmp_path) > step + 20)
    for pid in agents(tmp_path):
        os.killpg(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        SLOW("docker", ["container.python=/no/python"], "docker ended with 127"),
        ("podman", ['container.args=["--no-such-flag"]'], "unknown flag: --no-such-flag"),
    ],
)
def test_what_cannot_start(boxed: Any, tmp_path: Path, name: str, overrides: list[str], words: str) -> None:
    """CONT-2, law 6: exit 3 with the runtime's own words."""
    code, text = out(boxed(name, *overrides))
    assert code == 3, text
    assert words in text


def test_missing_runtime_and_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CONT-2: exit 3 for a machine without the runtime, and for a node without the checkout."""
    config = compose(["container=docker", "container.image=i", "data=synthetic"]).config
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"no docker on PATH") as caught:
        contained.check_container(config)
    assert caught.value.code == 3
    monkeypatch.setenv("PATH", str(FAKES))
    with pytest.raises(UserError, match="/no/place is missing") as caught:
        contained.check_container(
            replace(config, container=replace(config.container, mounts=["/no/place:/a"]))
        )
    assert caught.value.code == 3
    monkeypatch.setattr(contained, "CHECKOUT", tmp_path / "gone")
    with pytest.raises(UserError, match=r"checkout .*gone is missing") as caught:
        contained.check_container(config)
    assert caught.value.code == 3


def test_an_image_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CONT-2: exit 3 with the words of the runtime."""
    monkeypatch.setenv("PATH", f"{FAKES}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_RUNTIMES", str(tmp_path))
    config = compose(["container=docker", "container.image=missing/x", "data=synthetic"]).config
    plan = container_plan(config, tmp_path, "cpu", {})
    with pytest.raises(UserError, match=r"cannot pull missing/x:\n.*manifest unknown") as caught:
        contained.fetch(plan, tmp_path / "log")
    assert caught.value.code == 3


def test_cleaning_touches_its_label_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CONT-2: of four containers only this node's of this job is removed."""
    monkeypatch.setenv("PATH", f"{FAKES}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_RUNTIMES", str(tmp_path))
    sleepers = []
    for job, node in (("a", "0"), ("a", "1"), ("b", "0")):
        sleepers.append(subprocess.Popen(["sleep", "60"], start_new_session=True))
        labels = [f"manyhead.job={job}", f"manyhead.node={node}"]
        (tmp_path / f"manyhead-{job}-{node}").write_text(
            json.dumps({"pid": sleepers[-1].pid, "labels": labels})
        )
    try:
        contained.remove("docker", contained.Where("a", "0", "2", "/code"))
        assert sleepers[0].wait(5) == -signal.SIGKILL
        assert [process.poll() for process in sleepers[1:]] == [None, None]
    finally:
        for process in sleepers:
            process.kill()
            process.wait()


def test_fingerprint(tmp_path: Path) -> None:
    """CONT-2: an image's file is known by its ends and size, a directory by nothing."""
    image = tmp_path / "i.sif"
    image.write_bytes(b"a" * 3_000_001)
    first = contained.fingerprint(image)
    image.write_bytes(b"a" * 3_000_000 + b"b")
    assert first is not None
    assert first != contained.fingerprint(image)
    assert contained.fingerprint(tmp_path) is None
