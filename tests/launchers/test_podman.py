"""A real podman around real ranks, in a root file system made from this machine's (CONT).

Marked `podman`: these skip, with the reason, where it cannot start anything. Whoever runs the tests is the
caller; if that is root, one more test tries rootless as a user without a name.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from src.code_identity import CHECKOUT
from src.compose import compose
from src.launchers.container import Mount, container_plan
from src.launchers.container_command import Where, render
from tests.launchers.conftest import Start
from tests.launchers.podman import USER, limits, missing
from tests.launchers.test_launch import out, wait_for

pytestmark = [pytest.mark.podman, pytest.mark.slow]
PLACES = ("usr", "etc", "proc", "dev", "sys", "tmp", "run")
SECRET = "wk_" + "w" * 30
TINY = ("data=synthetic", "data.ids=48", "model.num_layers=2", "sequence_length=32", "max_steps=2")


@cache
def reason() -> str | None:
    return missing()


@pytest.fixture(autouse=True)
def a_podman() -> None:
    """Skip where there is none."""
    if reason() is not None:
        pytest.skip(str(reason()))


def boxed(tmp_path: Path, name: str) -> list[str]:
    """Overrides of a run in a container of this machine's root, with this Python."""
    args = ",".join(f'"{word}"' for word in limits())
    return [
        *("container=podman", "container.image=/:O", f"container.python={sys.executable}"),
        *(f"container.args=[{args}]", "container.env=[FAKE_*]", f"run_name={name}"),
        *(f"paths.runs={tmp_path}/runs", f"paths.cache={tmp_path}/cache"),
    ]


def containers() -> list[str]:
    """Ids of all containers of ours."""
    command = ["podman", "ps", "--all", "--quiet", "--filter", "label=manyhead.job"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_it_trains(tmp_path: Path) -> None:
    """CONT-1, CONT-2: two real steps; every file is the caller's; no secret in what was written or said."""
    words = [sys.executable, "train.py", *TINY, "evaluation=none", *boxed(tmp_path, "one")]
    environment = {**os.environ, "WANDB_API_KEY": SECRET, "HF_TOKEN": SECRET, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(words, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs/one"
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.stat().st_uid for path in files} == {os.getuid()}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in done.stdout + done.stderr
    assert containers() == []


def test_codes_and_signals(start: Start, tmp_path: Path) -> None:
    """CONT-2, EXIT-1: 42 is 42; SIGTERM saves and ends with 75."""
    failing = start("launching", *boxed(tmp_path, "fails"), "max_steps=3", FAKE_FAIL="0:exit42@2")
    process = start("launching", *boxed(tmp_path, "stops"), "max_steps=4000", FAKE_SLEEP="0.05")
    wait_for(lambda: (tmp_path / "runs/stops/fake_step").exists())
    process.send_signal(signal.SIGTERM)
    assert out(process)[0] == 75
    code, text = out(failing)
    assert code == 42, text
    assert containers() == []


def test_kill_leaves_no_container(start: Start, tmp_path: Path) -> None:
    """LOCAL-2: podman's container outlives its client; the agent in it does not."""
    process = start("launching", *boxed(tmp_path, "killed"), "max_steps=4000", FAKE_SLEEP="0.05")
    wait_for(lambda: (tmp_path / "runs/killed/fake_step").exists())
    assert len(containers()) == 1
    os.kill(process.pid, signal.SIGKILL)
    started = time.monotonic()
    wait_for(lambda: containers() == [], 10.0)
    assert time.monotonic() - started < 10.0


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that a user without a name can reach, unlike those of pytest."""
    with tempfile.TemporaryDirectory(prefix="manyhead-rootless-") as name:
        for part in ("out", "home", "run", *(f"root/{below}" for below in PLACES)):
            (Path(name) / part).mkdir(parents=True)
        for link in ("bin", "sbin", "lib", "lib64"):
            (Path(name) / "root" / link).symlink_to(f"usr/{link}")
        for path in [Path(name), *Path(name).rglob("*")]:
            os.chown(path, USER, USER, follow_symlinks=False)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="the caller is rootless already")
def test_rootless(open_folder: Path) -> None:
    """CONT-2: the words for podman hold for a user without root, and what is written belongs to that user."""
    written = open_folder / "out/mine"
    config = compose(["container=podman", f"container.image={open_folder}/root"]).config
    config.container.args = [] if Path("/dev/mqueue").is_dir() else ["--ipc=private"]
    config.container.python = "/bin/sh"
    plan = container_plan(config, written.parent, "cpu", {})
    mounts = [
        Mount(path, path, path == str(written.parent), "") for path in ("/etc", "/usr", str(written.parent))
    ]
    where = Where("rootless", "0", "1", str(written.parent), ("MINE",), USER, USER)
    inner = ["-c", f"echo $MINE >{written}; exit 42"]
    command = render(replace(plan, mounts=mounts), replace(where, code="/etc"), inner, {})
    done = as_user(open_folder, command.argv)
    try:
        assert done.returncode == 42, done.stderr
        assert (written.read_text(), written.stat().st_uid) == ("yes\n", USER)
    finally:
        as_user(open_folder, ["podman", "system", "migrate"])


def as_user(home: Path, words: list[str]) -> Any:
    """Run a command as the user without a name."""
    change = [str(shutil.which("setpriv")), f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    places = {"PATH": "/usr/bin:/bin", "HOME": f"{home}/home", "XDG_RUNTIME_DIR": f"{home}/run", "USER": "no"}
    return subprocess.run(
        [*change, *words],
        env={**places, "MINE": "yes"},
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
