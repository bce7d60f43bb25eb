"""`python -m tests.spur.launching OVERRIDE…`: `train.py launcher=spur` with ranks that train nothing."""

from __future__ import annotations

import sys

from src.compose import compose
from src.launchers.remote import run_job

WORKER = "tests.launchers.fake_worker"

if __name__ == "__main__":
    words = ["launcher=spur", *sys.argv[1:]]
    raise SystemExit(run_job(compose(words).config, words, worker=WORKER))
