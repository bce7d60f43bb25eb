"""A rank that breaks ends the job, with its cause on disk: real ranks under the real launcher (ENG-29)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = """
import sys
from src.compose import compose
from src.launchers.launch import run_one
raise SystemExit(run_one(compose(sys.argv[1:]).config, sys.argv[1:], worker="tests.trainer.broken_worker"))
"""
LIMIT = 40.0
"""Seconds from the break to the end of the job (RANK-2)."""
PLACES = {
    "forward@3": (1, "ValueError: broken in forward"),
    "backward@3": (1, "ValueError: broken in backward"),
    "loader@3": (1, "RuntimeError: step 2: broken in loader"),
    "save": (1, "broken in save"),
    "kill@3": (137, "SIGKILL"),
    "hang@3": (6, "rank 1 did not come to a collective"),
}
"""Where rank 1 of 2 breaks or hangs → the job's exit code and words of its cause."""
OFTEN = ("backward@3", "loader@3")
"""Ends of the kind that `forward@3` shows already."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", [pytest.param(p, marks=[pytest.mark.soak] if p in OFTEN else []) for p in PLACES]
)
def test_a_broken_rank_ends_the_job(tmp_path: Path, place: str) -> None:
    """ENG-29, RUN-6: every way ends the job in time, with code, rank and cause in `status.json`.

    A rank that hangs says nothing: the one that waited for it in vain names it, with its own traceback.
    """
    mesh = "pp2" if place == "hang@3" else "ep2"  # Between stages gloo's receives time out, not collectives.
    overrides = ["data=synthetic", "tokenizer=none", f"mesh={mesh}", "max_steps=4", "run_name=broken"]
    overrides += ["evaluation=none", f"paths.runs={tmp_path}", "sequence_length=32", "micro_batch_size=2"]
    overrides += ["global_batch_size=8", f"launcher.collective_timeout={'8s' if mesh == 'pp2' else '10m'}"]
    env = os.environ | {"BREAK": f"1:{place}", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-c", LAUNCH, *overrides]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    ended = time.time()
    code, cause = PLACES[place]
    status = json.loads((tmp_path / "broken" / "status.json").read_text())
    assert (done.returncode, status["exit_code"], status["state"]) == (code, code, "failed"), done.stderr
    noticed = 0 if place == "hang@3" else 1
    assert status["first_failing_rank"] == noticed
    assert cause in done.stdout + done.stderr
    record = tmp_path / "broken" / "control" / f"error.{noticed}.json"
    if place == "kill@3":
        assert status["signal"] == 9
    else:
        words = "Timed out waiting" if place == "hang@3" else "broken_worker"
        assert words in json.loads(record.read_text())["traceback"]
        assert ended - record.stat().st_mtime < LIMIT
