"""A copy of the checkout, so that a test may edit code, and a way to start commands in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from src.code_identity import CHECKOUT

PARTS = ("src", "conf", "hydra_plugins", "tests/launchers", "scripts")
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parts of this checkout that a launch needs, in a directory of the test's own."""
    root = tmp_path_factory.mktemp("checkout")
    for part in PARTS:
        shutil.copytree(CHECKOUT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train.py", "tests/__init__.py"):
        shutil.copy(CHECKOUT / name, root / name)
    return root


@pytest.fixture
def start(checkout: Path, tmp_path: Path) -> Start:
    """Start `python -m tests.launchers.<module>` with its runs below `tmp_path`."""
    started: list[subprocess.Popen[str]] = []

    def begin(
        module: str, *overrides: str, folder: str = "runs", data: str = "synthetic", **environment: str
    ) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", f"tests.launchers.{module}", f"data={data}", *overrides]
        env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_WAIT_POLICY": "PASSIVE", **environment}
        env.pop("OMP_NUM_THREADS", None)
        process = subprocess.Popen(
            [*command, f"paths.runs='{tmp_path}/{folder}'"],
            cwd=checkout,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
