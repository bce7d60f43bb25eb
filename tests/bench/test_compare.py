"""BENCH-9: two trees in turn, three numbers with their noise, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import bench_compare
from scripts.bench_compare import Blocks, curve_verdict, report, verdict
from src.bench import trees
from src.bench.trees import Tree
from tests.docs.commands import ROOT

TRAIN = """
import json, os, pathlib, sys, time
said = dict(word.split("=", 1) for word in sys.argv[1:])
assert "base" not in said or said["base"] == NAME, "overrides reach both sides"
time.sleep(float(said.get("sleep", 0)))
run = pathlib.Path(said["paths.runs"]) / said["run_name"]
run.mkdir(parents=True)
step = {"mem_peak_bytes": PEAK << 30, "step_time": TIME}
lines = [{**step, "loss": 5 - LOSS * s} for s in range(int(said["max_steps"]))]
lines[0]["step_time"] = 99.0
(run / "metrics.jsonl").write_text("".join(json.dumps(line) + chr(10) for line in lines))
with open(pathlib.Path(__file__).parent.parent / "order", "a") as order:
    order.write(NAME + " ")
"""


def write(root: Path, name: str, step: float, peak: int, loss: float) -> None:
    """A checkout whose train.py says how fast it was."""
    root.mkdir(exist_ok=True)
    head = f"NAME, TIME, PEAK, LOSS = {name!r}, {step}, {peak}, {loss}\n"
    (root / "train.py").write_text(head + TRAIN)


def git(root: Path, *words: str) -> str:
    options = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", "-C", str(root), *options, *words], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, and an edit that trains faster and in less."""
    root, scratch = tmp_path / "here", tmp_path / "scratch"
    scratch.mkdir()
    write(root, "old", 0.02, 4, 0.1)
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "old")
    write(root, "new", 0.01, 3, 0.1)
    monkeypatch.setattr(trees, "CHECKOUT", root)
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    return root


FEW = ["--blocks", "2", "--steps", "3", "--warmup", "1"]


def left_behind(checkout: Path) -> list[str]:
    """What a comparison must not leave: worktrees beside the first, and files in the scratch directory."""
    worktrees = [line for line in git(checkout, "worktree", "list").splitlines() if "scratch" in line]
    return [*worktrees, *(path.name for path in (checkout.parent / "scratch").iterdir())]


def test_bench_9_a_commit_in_turn_with_the_working_tree(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """BENCH-9: A B A B, each by its own code; time, memory and curve; the worktree is gone afterwards."""
    assert bench_compare.main(["HEAD", *FEW]) == 0
    told = capsys.readouterr().out
    assert "working tree" in told
    assert "edited" in told
    assert "A 50.0% faster (noise 0.0%)" in told
    assert "A 25.0% less (noise 0.0%)" in told
    assert "equal bit for bit" in told
    assert left_behind(checkout) == []
    order = (checkout.parent / "order").read_text().split()
    assert order == ["new", "new"], "the commit's code lies elsewhere, and writes there"


def test_bench_9_a_directory_as_it_is(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """BENCH-9: another checkout is used where it lies and stays; a slower curve is told with its step."""
    other = tmp_path / "other"
    write(other, "other", 0.01, 3, 0.1001)
    assert bench_compare.main([str(other), *FEW]) == 0
    told = capsys.readouterr().out
    assert "none (A 0.0% faster, noise 0.0%)" in told
    assert "of the loss apart at step 20" in told
    assert (tmp_path / "order").read_text().split() == ["new", "other"] * 2
    assert (other / "train.py").is_file()


def test_bench_9_mistakes_and_failures_leave_nothing(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """BENCH-9: no such commit, no checkout, a side that fails: a message, its code, and nothing stays."""
    assert bench_compare.main(["no-such-commit", *FEW]) == 2
    assert bench_compare.main([str(tmp_path / "scratch"), *FEW]) == 2
    assert "holds no train.py" in capsys.readouterr().err
    assert bench_compare.main(["HEAD", *FEW, "base=old"]) == 1
    assert "overrides reach both sides" in capsys.readouterr().err
    assert left_behind(checkout) == []


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_bench_9_an_interrupt_leaves_nothing(checkout: Path, number: signal.Signals) -> None:
    """BENCH-9: in the middle of a run worktree, runs and the process that trains are gone."""
    code = (  # A shell ignores SIGINT for what it starts in the background, and what that starts inherits it.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "import sys, tempfile, pathlib; from src.bench import trees; from scripts import bench_compare;"
        "trees.CHECKOUT = pathlib.Path(sys.argv[1]); tempfile.tempdir = sys.argv[2];"
        "sys.exit(bench_compare.main(['HEAD', 'sleep=60']))"
    )
    scratch = checkout.parent / "scratch"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(checkout), str(scratch)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while not list(scratch.glob("*/runs/*.log")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left_behind(checkout), "it has begun"
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert left_behind(checkout) == []
    sleeping = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(scratch) not in sleeping


def test_bench_3_inside_the_noise_is_none() -> None:
    """BENCH-3, BENCH-9: what a side differs from itself is no difference."""
    words = ("faster", "slower")
    assert verdict(-0.04, 0.05, words) == "none (A 4.0% faster, noise 5.0%)"
    assert verdict(0.06, 0.05, words) == "A 6.0% slower (noise 5.0%)"


def blocks(curves: list[list[float]]) -> Blocks:
    return Blocks(Tree("a", Path()), [1.0] * len(curves), [1.0] * len(curves), curves)


def test_bench_9_curves() -> None:
    """BENCH-9: the step that is furthest apart; runs of one side that differ are noise; nan is told."""
    head, same = blocks([[4.0, 3.0], [4.0, 3.0]]), blocks([[4.0, 3.0], [4.0, 3.0]])
    assert curve_verdict(head, same) == "equal bit for bit"
    other = blocks([[4.0, 3.3], [4.0, 3.3]])
    assert curve_verdict(head, other) == "A and B 0.091 of the loss apart at step 2 (noise 0)"
    noisy = blocks([[4.0, 3.3], [4.0, 2.9]])
    assert curve_verdict(head, noisy).startswith("none")
    broken = blocks([[4.0, float("nan")]] * 2)
    assert "inf of the loss apart at step 2" in curve_verdict(head, broken)
    assert len(report(head, other)) == 5
