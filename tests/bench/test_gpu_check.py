"""BENCH-6: the stages of `scripts/gpu_check.sh` and the wheels that it installs, beside a made-up Python."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.docs.commands import ROOT

PYTHON = """#!/usr/bin/env bash
case "$*" in
  *src.bench.wheels*) exec REAL "$@" ;;
  *"import sys, torch"*) exit 0 ;;
esac
echo "$* PYTHONPATH=${PYTHONPATH%%:*}" >> LOG
case "$*" in
  *bench_head*) exit 7 ;;
esac
"""
"""Writes down what it is asked for; head and loss fail."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the script with the sources beside it and `python3` on a path of its own."""
    root, programs = tmp_path / "here", tmp_path / "bin"
    for folder in (root / "scripts", programs):
        folder.mkdir(parents=True)
    (root / "src").symlink_to(ROOT / "src")
    script = root / "scripts/gpu_check.sh"
    script.write_bytes((ROOT / "scripts/gpu_check.sh").read_bytes())
    python = programs / "python3"
    python.write_text(PYTHON.replace("REAL", sys.executable).replace("LOG", str(tmp_path / "log")))
    for program in (script, python):
        program.chmod(0o755)
    return root


def check(checkout: Path, *words: str) -> tuple[int, str, list[str]]:
    """Exit code, output, and what Python was asked for, without where it was to look for packages."""
    folder = checkout.parent
    log = folder / "log"
    log.unlink(missing_ok=True)
    environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "TMPDIR": str(folder), "OUT": "/out"}
    command = [str(checkout / "scripts/gpu_check.sh"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    asked = log.read_text().splitlines() if log.exists() else []
    return done.returncode, done.stdout + done.stderr, [line.partition(" PYTHONPATH=")[0] for line in asked]


def test_bench_6_stages(checkout: Path) -> None:
    """BENCH-6: one stage, some of its parts, or all; what fails is told and leaves the others."""
    code, said, asked = check(checkout, "ops", "optimizer", "moe", "--", "--cases", "tiny")
    assert (code, asked) == (
        0,
        [
            f"scripts/bench_{name}.py --out /out/bench_{name}.jsonl --cases tiny"
            for name in ("optimizer", "moe")
        ],
    )
    assert [line.split()[:2] for line in said.splitlines() if line] == [["ops", "optimizer"], ["ops", "moe"]]
    code, said, asked = check(checkout, "bench", "a", "b", "--", "--profile")
    assert (code, asked) == (0, ["scripts/bench_model.py --out /out/bench_model.jsonl --cases a,b --profile"])
    code, said, asked = check(checkout)
    names = [line.split()[0].removeprefix("scripts/bench_").removesuffix(".py") for line in asked[1:]]
    assert asked[0].startswith("-m pytest -m gpu")
    assert (code, names) == (1, ["model", "moe", "attention", "head", "optimizer", "elementwise"])
    assert "ops head         exit   7" in said


def test_bench_6_mistakes(checkout: Path) -> None:
    """BENCH-6: an unknown stage or operation is named before anything runs."""
    for words, told in ((["test"], "unknown stage 'test'"), (["ops", "hat"], "unknown operation 'hat'")):
        code, said, asked = check(checkout, *words)
        assert (code, told in said, asked) == (2, True, [])


def wheel(path: Path) -> bytes:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("thing.py", "x = 1\n" * 99)
    return path.read_bytes()


def test_wheels_are_installed_for_the_run_or_for_good(checkout: Path) -> None:
    """What works only where packages are installed goes there; pieces of a wheel may come in two runs."""
    folder = checkout / ".whl"
    folder.mkdir()
    wheel(folder / "small-1-py3-none-any.whl")
    data = wheel(checkout.parent / "large")
    base = "nvidia_cutlass_dsl_libs_base-4-cp312-cp312-linux.whl"
    (folder / f"{base}.part-aa").write_bytes(data[:50])
    code, said, asked = check(checkout, "ops", "moe")
    assert (code, "not whole with 1 pieces" in said, len(asked)) == (0, True, 2)
    assert "--target" in asked[0]
    assert asked[0].endswith(".whl/small-1-py3-none-any.whl")
    (folder / f"{base}.part-aa").rename(folder / f"{base}.part-ab")
    (folder / f"{base}.part-ab").write_bytes(data[50:])
    code, said, asked = check(checkout, "ops", "moe")
    kept = checkout.parent / "manyhead-wheels" / base
    assert asked[0] == f"-m pip install -q --no-index --no-deps {kept}"
    assert "--target" in asked[1]
    assert (code, kept.read_bytes() == data, len(asked)) == (0, True, 3)
