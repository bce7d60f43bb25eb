"""`python -m tests.launchers.launching OVERRIDE…`: a launching process whose ranks train nothing."""

from __future__ import annotations

import sys

from src.compose import compose
from src.launchers.launch import run_one

WORKER = "tests.launchers.fake_worker"

if __name__ == "__main__":
    raise SystemExit(run_one(compose(sys.argv[1:]).config, sys.argv[1:], worker=WORKER))
