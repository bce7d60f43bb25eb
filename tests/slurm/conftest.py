"""Commands on a Slurm that `SLURM_CONF` names; without one these tests say why they skip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from src.code_identity import CHECKOUT
from src.records import read_json
from tests.launchers.secrets import SECRETS, CommandLines

TINY = (
    "data=synthetic",
    "data.ids=48",
    "model.num_layers=2",
    "sequence_length=32",
    "max_steps=3",
    "evaluation=none",
)
"""A training that is over at once."""


def missing() -> str | None:
    """Why there is no Slurm to test on."""
    if "SLURM_CONF" not in os.environ or not Path(os.environ["SLURM_CONF"]).exists():
        return "SLURM_CONF names no file; tests/slurm/cluster.py starts a cluster of two nodes"
    if shutil.which("sinfo") is None or subprocess.run(["sinfo"], capture_output=True).returncode:
        return "no Slurm answers"
    return None


@dataclass
class Cluster:
    """Starts commands with runs below `folder`; each is known by its run's name."""

    folder: Path
    started: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    lines: CommandLines = field(default_factory=CommandLines)

    def start(self, name: str, *words: str, environment: dict[str, str] | None = None) -> None:
        """Start a command whose output goes to `<name>.log`."""
        env = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "PATH": self.path()}
        with (self.folder / f"{name}.log").open("w") as log:
            self.started[name] = subprocess.Popen(
                [*words],
                cwd=CHECKOUT,
                env={**env, **SECRETS, **(environment or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def job(self, name: str, *words: str, environment: dict[str, str] | None = None) -> None:
        """Start `launcher=slurm` with ranks that train nothing."""
        command = [sys.executable, "-m", "tests.slurm.launching", "data=synthetic", "max_steps=4"]
        self.start(name, *command, *self.places(name), *words, environment=environment)

    def path(self) -> str:
        """PATH with a sacct that notes that it was called."""
        return (
            f"{self.folder / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        )

    def places(self, name: str) -> list[str]:
        """Overrides that put a run below the folder."""
        return [f"paths.runs={self.folder}/runs", f"run_name={name}"]

    def run(self, name: str) -> Path:
        """The run's directory."""
        return self.folder / "runs" / name

    def status(self, name: str) -> dict[str, Any]:
        """The run's `status.json`."""
        return read_json(self.run(name) / "status.json") or {}

    def id(self, name: str) -> str | None:
        """The id of the run's job."""
        return (read_json(self.run(name) / "job.json") or {}).get("id")

    def end(self, name: str) -> tuple[int, str]:
        """Code and output of a command, at its end."""
        code = self.started[name].wait(timeout=120)
        return code, (self.folder / f"{name}.log").read_text()


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A folder that all nodes see, and whatever was started there ended."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    (made.folder / "bin").mkdir()
    sacct = made.folder / "bin" / "sacct"
    sacct.write_text(f"#!/bin/sh\ntouch {made.folder}/sacct-was-called\nexit 1\n")
    sacct.chmod(0o755)
    with made.lines:
        yield made
    for process in made.started.values():
        if process.poll() is None:
            process.kill()
            process.wait()
