"""What the batch shell of a job of Spur does beside its step: `batch.py {watch,hold} RUN` (SPUR-4, 5)."""

from __future__ import annotations

import os
import time
from pathlib import Path

from src.compose import load_config
from src.durations import seconds
from src.launchers.beats import BATCH, BEAT, sign
from src.launchers.scheduler import TERMINAL
from src.launchers.spur import Spur
from src.status import read_status


def watch(run: Path) -> int:
    """Give signs of life while the batch shell lives; ask the ranks to stop in time before the limit.

    No signal comes before Spur's limit, and a step hears none at all.
    """
    launcher, shell, count = load_config(run / "config.yaml").launcher, os.getppid(), 0
    left = Spur().time_left(os.environ.get("SPUR_JOB_ID", ""))
    end = None if left is None else time.monotonic() + left - seconds(launcher.grace)
    stop = run / "control" / "stop"
    while os.getppid() == shell:
        count += 1
        sign(run / "control", BATCH, count)
        if end is not None and time.monotonic() >= end and not stop.exists():
            stop.write_text(f"the job's time limit, less launcher.grace={launcher.grace}\n")
        time.sleep(BEAT)
    return 0


def hold(run: Path) -> int:
    """Keep a node's share of the job until the first node has ended it: to 0.7 each node runs the script."""
    was_running = False
    while True:
        state = (read_status(run) or {}).get("state")
        if state in TERMINAL or (was_running and state == "queued"):
            return 0
        was_running = was_running or state == "running"
        time.sleep(BEAT)
