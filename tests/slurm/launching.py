"""`python -m tests.slurm.launching OVERRIDE…`: one job of Slurm, or Spur, whose ranks train nothing."""

from __future__ import annotations

import sys

from src.compose import compose
from src.launchers.remote import run_job

WORKER = "tests.launchers.fake_worker"

if __name__ == "__main__":
    words = sys.argv[1:] if "launcher=spur" in sys.argv else ["launcher=slurm", *sys.argv[1:]]
    raise SystemExit(run_job(compose(words).config, words, worker=WORKER))
