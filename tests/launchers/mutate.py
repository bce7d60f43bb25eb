"""Make wrong changes in a copy of the checkout, and see that tests notice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from src.code_identity import CHECKOUT

Mutation = tuple[str, str, str, str]
"""File in `src/launchers`, what stands there, what is put instead, the test that notices."""


TESTS = ("slurm", "launchers", "spur", "fakes")
"""Folders of tests that these tests need."""


def check(name: str, mutations: Sequence[Mutation], tests: str, copy: Path) -> None:
    """Each mutation of one file makes its test, one of those in the file or folder `tests`, fail."""
    for part in ("src", "conf", "hydra_plugins", *(f"tests/{folder}" for folder in TESTS)):
        shutil.copytree(CHECKOUT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("train.py", "tests/__init__.py", "pyproject.toml"):
        shutil.copy(CHECKOUT / file, copy / file)
    path = copy / "src" / "launchers" / name
    original = path.read_text()
    for _, old, new, test in (mutation for mutation in mutations if mutation[0] == name):
        assert old in original, old
        path.write_text(original.replace(old, new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", tests, "-k", f"({test}) and not mutations"]
        paths = os.pathsep.join([str(copy), *sys.path])
        done = subprocess.run(
            [*command, "-m", "not slow and not soak and not gpu", "-p", "no:cacheprovider"],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1, f"{old} -> {new}: {done.stdout[-2000:]}"
