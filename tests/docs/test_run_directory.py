"""The commands marked `run` work, and the run directory's table is what they leave behind (DOC-1, RUN)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.commands import ROOT
from tests.docs.markdown import Document

PAGE = ROOT / "docs/run_directory.md"
USED = ("train.py", "conf", "scripts", "src")
"""What the commands of the documents need of a checkout."""


def table() -> dict[str, str]:
    """Name → when it is there, from the page's first table."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    return {
        row[0].split("`")[1].rstrip("/"): row[2] for row in rows if len(row) == 3 and row[0].startswith("`")
    }


def differences(run: Path, rows: dict[str, str]) -> list[str]:
    """Names that are in the directory but not in the table, or promised as always there and missing."""
    there = {path.name for path in run.iterdir()}
    always = {name for name, when in rows.items() if when == "always"}
    return sorted([*(there - rows.keys()), *(always - there)])


@pytest.mark.slow
def test_run_fences_work_and_leave_what_the_table_says(tmp_path: Path) -> None:
    """DOC-1, RUN: the marked commands run in order in an empty directory; RUN has the names of the table."""
    for name in USED:
        (tmp_path / name).symlink_to(ROOT / name)
    (script,) = [fence.text for fence in Document.read(PAGE).fences if fence.note == "run"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is finished" in done.stdout
    assert differences(tmp_path / "runs/look", table()) == []
    assert (tmp_path / "look.safetensors").is_file()


def test_every_run_fence_is_run() -> None:
    """DOC-1: no other page has commands marked to be run that nobody runs."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("conf/*.md")]
    marked = [page for page in pages if any(f.note == "run" for f in Document.read(page).fences)]
    assert marked == [PAGE]


def test_mutation_a_file_that_the_table_lacks_is_named(tmp_path: Path) -> None:
    """RUN: a new file in the directory, or one that is promised and missing, is found."""
    rows = {"config.yaml": "always", "batches": "with an option"}
    (tmp_path / "notes.txt").touch()
    assert differences(tmp_path, rows) == ["config.yaml", "notes.txt"]
