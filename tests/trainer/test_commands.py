"""Commands as one types them: on with a run on another mesh, stopped by a signal, refused, evaluated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from src.trainer.checkpoint.directory import steps
from tests.trainer.small import lines

ROOT = Path(__file__).resolve().parents[2]


def begin(tmp_path: Path, script: str, *words: str) -> subprocess.Popen[str]:
    """Start a script of the checkout."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, script, *words]
    if script == "train.py":
        command += [f"paths.runs={tmp_path}/runs", f"paths.data={tmp_path}/data"]
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def call(tmp_path: Path, script: str, *words: str, code: int = 0) -> str:
    """Run a script to its end; what it says."""
    process = begin(tmp_path, script, *words)
    said, errors = process.communicate(timeout=280)
    assert process.returncode == code, said + errors
    return said + errors


def flat(tmp_path: Path, name: str, step: int) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    checkpoint = tmp_path / "runs" / name / "checkpoints" / f"step-{step:08d}"
    out = tmp_path / f"{name}.safetensors"
    call(tmp_path, "scripts/checkpoints.py", "flat", str(checkpoint), str(out))
    return load_file(out)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_goes_on_on_another_mesh_and_equals_one_process(tmp_path: Path) -> None:
    """CKPT-2, CKPT-5, EVAL-6: pp2ep2, then ep4, is single; the loss of every step within 1e-6 in fp32."""
    common = (
        "lr_schedule=constant",
        "sequence_length=64",
        "evaluation.samples=8",
        "evaluation.sample_tokens=4",
    )
    call(tmp_path, "train.py", "run_name=x", *common, "mesh=pp2ep2", "max_steps=3")
    run = tmp_path / "runs" / "x"
    found: dict[str, Any] = json.loads(call(tmp_path, "scripts/evaluate.py", f"run={run}"))
    recorded = lines(run, "evaluation.jsonl")[-1]
    assert (found["step"], found["tokens"]) == (3, recorded["tokens"])
    assert found["loss"] == pytest.approx(recorded["loss"], rel=1e-6)
    assert "goes on from step 3" in call(
        tmp_path, "train.py", "run_name=x", *common, "mesh=ep4", "max_steps=6"
    )
    call(tmp_path, "train.py", "run_name=single", *common, "mesh=single", "max_steps=6")
    ours, theirs = lines(run), lines(tmp_path / "runs" / "single")
    assert [line["attempt"] for line in ours] == [1, 1, 1, 2, 2, 2]
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in ours] == pytest.approx([line[key] for line in theirs], rel=1e-6), key
    one, two = flat(tmp_path, "x", 6), flat(tmp_path, "single", 6)
    assert one.keys() == two.keys()
    for name in [name for name in one if "::" not in name]:
        assert float((one[name] - two[name]).norm() / two[name].norm().clamp(min=1e-12)) < 1e-5, name
    words = ("run_name=x", *common, "mesh=ep4", "max_steps=7")
    assert "resume=none" in call(tmp_path, "train.py", *words, "resume=none", code=8)
    assert "no complete checkpoint" in call(tmp_path, "train.py", *words, f"resume={run}", code=8)


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Wait until the run's metrics reach a step."""
    path = run / "metrics.jsonl"
    while process.poll() is None and (not path.exists() or len(path.read_text().splitlines()) < step):
        time.sleep(0.1)


@pytest.mark.slow
def test_a_signal_to_one_rank_saves_once_on_all_ckpt_10(tmp_path: Path) -> None:
    """CKPT-10: TERM to rank 1 of 2: one save at one step, exit 75; the same command goes on from there."""
    words = ["run_name=x", "data=synthetic", "tokenizer=none", "mesh=ep2", "evaluation=none"]
    words += ["sequence_length=32", "checkpoint.every=0", "logger.flush_every=1", "lr_schedule=constant"]
    process, run = begin(tmp_path, "train.py", *words, "max_steps=100000"), tmp_path / "runs" / "x"
    wait_for_step(run, 3, process)
    first = next(
        line for line in (run / "ranks" / "rank_00001.log").read_text().splitlines() if "pid" in line
    )
    os.kill(int(first.split()[3]), signal.SIGTERM)
    said, errors = process.communicate(timeout=200)
    assert process.returncode == 75, said + errors
    last = lines(run)[-1]["step"]
    assert steps(run) == [run / "checkpoints" / f"step-{last:08d}"]
    said = call(tmp_path, "train.py", *words, f"max_steps={last + 1}")
    assert f"goes on from step {last}" in said
    assert [line["step"] for line in lines(run)] == list(range(1, last + 2))
