"""What the end of an attempt means for `status.json` (RUN-6, EXIT)."""

from __future__ import annotations

from pathlib import Path

from src.launchers.outcome import first_failure
from src.launchers.watch import Ended
from src.status import Status, last_step


def settle(status: Status, run: Path, ended: Ended) -> None:
    """State, code and reason of an attempt whose ranks have ended."""
    status.last_step = last_step(run)
    status.signal = ended.signal
    failure = first_failure(run / "control", ended.codes, ended.killed)
    if failure is None and (run / "control" / "requeue").exists():
        status.state = "stopped"
        status.exit_code = 130 if ended.signal == 2 else 75
    elif failure is None:
        status.state, status.exit_code, status.signal = "done", 0, None
    elif ended.killed and ended.signal is not None:
        fail(status, 128 + ended.signal, "Signal", "killed before its state was saved", ended.signal)
    else:
        fail(status, failure.code, failure.type, failure.message, failure.signal)
        status.first_failing_rank = failure.rank


def fail(status: Status, code: int, kind: str, message: str, number: int | None = None) -> None:
    """Make `status` that of a failure."""
    status.state, status.exit_code, status.signal = "failed", code, number
    status.reason = {"type": kind, "message": message}
