"""What Slurm says about jobs, from squeue alone, and what that means beside `status.json` (SLURM-2)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from src.errors import UserError
from src.launchers.outcome import exit_code
from src.records import Record

CANCELLED, LOST = 143, 5
STAND: dict[str, int] = {
    "CANCELLED": CANCELLED,
    "TIMEOUT": CANCELLED,
    "PREEMPTED": CANCELLED,
    "DEADLINE": CANCELLED,
    "OUT_OF_MEMORY": 137,
    "NODE_FAIL": LOST,
    "BOOT_FAIL": LOST,
    "HELD": LOST,
}
"""States that stand whatever the run wrote, with their exit codes; HELD is what `Seen` makes of a job whose
launch failed, for it waits until somebody releases it."""
HELD = re.compile(r"launch.failed.requeued.held", re.IGNORECASE)
"""Reason of such a job."""
ENDED = ("COMPLETED", "FAILED")
"""States in which the run's own status decides; all others mean that the job is alive."""
SAVED = 75
TERMINAL = ("done", "stopped", "failed")
"""States of `status.json` that end an attempt."""
SILENT, UNKNOWN = 15.0, 10.0
"""Seconds after which an ended job without a status has failed, and an unknown job is lost."""
INHERITED = re.compile(r"(SBATCH|SRUN|SLURM|SPUR)_(?!.*(CONF|ADDRESS|ADDR|TOKEN|JWT)$)")
"""Variables of an outer job that would beat the script's flags (SUB-7)."""
PATIENCE = 30
"""Seconds that a command of Slurm may take."""


@dataclass(frozen=True)
class Seen:
    """One line of squeue."""

    state: str
    reason: str

    @property
    def is_alive(self) -> bool:
        """Whether the job waits, runs, or is being cleaned up."""
        return self.state not in STAND and self.state not in ENDED


@dataclass(frozen=True)
class Verdict:
    """How a job ended."""

    state: str
    """`done`, `stopped` or `failed`."""
    code: int
    reason: str | None
    """None where `status.json` has it already."""
    kind: str = ""
    """The scheduler's state."""


def merge(
    seen: Seen | None, status: Record | None, saved: bool, waited: float, code: int = 1
) -> Verdict | None:
    """How the job ended, or None while nobody can say.

    Args:
        seen: what squeue says; None if it does not know the job.
        status: `status.json` of this attempt.
        saved: whether the ranks stopped on request and saved.
        waited: seconds since squeue first said so.
        code: of the batch script, for an end without a status.
    """
    if seen is not None and seen.is_alive:
        return None
    if seen is not None and seen.state in STAND:
        words = f"the job ended as {seen.state}" + (f" ({seen.reason})" if seen.reason != "None" else "")
        if saved and seen.state in ("TIMEOUT", "PREEMPTED"):
            return Verdict("stopped", SAVED, f"{words}, state saved", seen.state)
        return Verdict("failed", STAND[seen.state], words, seen.state)
    if status is not None and status.get("state") in TERMINAL:
        return Verdict(str(status["state"]), int(status["exit_code"]), None)
    if seen is not None and waited >= SILENT:
        words = f"the job ended as {seen.state} and left no status; its log is in the folder slurm"
        return Verdict("failed", code or 1, words, seen.state)
    if seen is None and waited >= UNKNOWN:
        return Verdict("failed", LOST, "the scheduler does not know the job any more", "LOST")
    return None


def read_squeue(text: str) -> dict[str, Seen]:
    """The lines of `squeue -h -r -o '%i|%T|%r'` by job id."""
    rows = [line.strip().split("|", 2) for line in text.splitlines() if line.count("|") >= 2]
    return {row[0]: Seen("HELD" if HELD.search(row[2]) else row[1], row[2]) for row in rows}


def look(ids: Iterable[str]) -> dict[str, Seen] | None:
    """What squeue says about the jobs that it knows; None if it cannot be asked now."""
    bases = ",".join(sorted({number.partition("_")[0] for number in ids}))
    done = ask("squeue", "-h", "-r", "-t", "all", "-j", bases, "-o", "%i|%T|%r")
    if done is None:
        return None
    if done.returncode != 0 and "Invalid job id" not in done.stderr:
        return None
    return read_squeue(done.stdout)


def cancel(ids: Iterable[str]) -> None:
    """Cancel jobs; whether they end is for `look` to say."""
    ask("scancel", *sorted(set(ids)))


def requeue(number: str) -> bool:
    """Put a running job back into the queue; it is killed at once (SUB-6)."""
    done = ask("scontrol", "requeue", number)
    return done is not None and done.returncode == 0


def batch_code(number: str) -> int:
    """The batch script's exit code as Slurm has it, `c:s`; 1 where nobody knows."""
    done = ask("scontrol", "-o", "show", "job", number)
    found = re.search(r"\bExitCode=(\d+):(\d+)", done.stdout if done is not None else "")
    if found is None:
        return 1
    return exit_code(-int(found[2])) if int(found[2]) else int(found[1])


def own_id(shell: Mapping[str, str]) -> str | None:
    """The id of the job, or of the task of an array, that this process is a part of, as squeue writes it."""
    if "SLURM_ARRAY_JOB_ID" in shell:
        return f"{shell['SLURM_ARRAY_JOB_ID']}_{shell['SLURM_ARRAY_TASK_ID']}"
    return shell.get("SLURM_JOB_ID")


def max_array_size() -> int:
    """Most tasks of one array; Slurm's own default where it does not say."""
    done = ask("scontrol", "show", "config")
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", done.stdout if done is not None else "", re.M)
    return int(found[1]) if found else 1001


def ask(*command: str) -> subprocess.CompletedProcess[str] | None:
    """Run a command of Slurm; None if it is missing or does not answer."""
    try:
        with outside_of_jobs():
            return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


@contextmanager
def outside_of_jobs() -> Iterator[None]:
    """The environment without an outer job's variables; put back on the way out."""
    removed = {name: os.environ.pop(name) for name in list(os.environ) if INHERITED.match(name)}
    try:
        yield
    finally:
        os.environ.update(removed)


def need_slurm() -> None:
    """Refuse to submit where there is no Slurm, and inside of a job (DIRECT-5)."""
    if shutil.which("sbatch") is None:
        fix = "submit from a login node, type launcher=local, or dry_run=true to see the script"
        raise UserError(f"launcher=slurm: there is no sbatch on PATH; {fix}", code=3)
    if "SLURM_JOB_ID" in os.environ:
        number = os.environ["SLURM_JOB_ID"]
        raise UserError(f"launcher=slurm inside of job {number}: type launcher=local, or submit from outside")
