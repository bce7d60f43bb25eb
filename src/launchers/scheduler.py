"""What a scheduler says about jobs, and what that means beside `status.json` (SLURM-2).

Slurm and Spur have the same commands and states; each is a `Scheduler`.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from src.config import Config
from src.launchers.outcome import exit_code
from src.records import Record, read_json

if TYPE_CHECKING:
    from src.launchers.plan import LaunchPlan

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
"""Seconds that a command of a scheduler may take."""


@dataclass(frozen=True)
class Seen:
    """One line of squeue."""

    state: str
    reason: str

    @property
    def is_alive(self) -> bool:
        """Whether the job waits, runs, or is being cleaned up."""
        return self.state not in STAND and self.state not in ENDED


class Scheduler(Protocol):
    """What takes jobs."""

    name: str
    """As people write it."""
    folder: str
    """Of scripts and logs, in a run's or a sweep's directory."""
    has_arrays: bool
    """Whether a sweep is submitted at once, jobs that ask for the same together; else one by one."""

    def need(self) -> None:
        """Refuse to submit where that cannot work: UserError (2 inside of a job, 3 without the scheduler)."""

    def script(self, config: Config, plans: Sequence[LaunchPlan]) -> str:
        """The batch script that these runs would be submitted with; writes nothing and asks nobody."""

    def submit(
        self, folder: Path, plans: Sequence[LaunchPlan], paths: Sequence[Path], code: Path, most: int | None
    ) -> list[str]:
        """Submit runs that ask for the same, return their jobs' ids; raises UserError (5).

        Args:
            folder: for scripts and logs.
            plans: of the runs.
            paths: their directories, which may differ from the plans' by a number.
            code: the snapshot that jobs import.
            most: jobs of an array that run at the same time; None for no limit.
        """

    def most_tasks(self) -> int:
        """Most jobs of one `submit`."""

    def look(self, ids: Iterable[str]) -> dict[str, Seen] | None:
        """What the queue says about the jobs that it knows; None if it cannot be asked now."""

    def time_left(self, number: str) -> int | None:
        """Seconds until a job's time limit; None without one, or where nobody says."""

    def cancel(self, ids: Iterable[str]) -> None:
        """Cancel jobs; whether they end is for `look` to say."""

    def requeue(self, run: Path, number: str) -> bool:
        """Called inside of the run's job, which ends at once: let it start again."""

    def code(self, number: str) -> int:
        """The batch script's exit code as the scheduler has it; 1 where nobody knows."""


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
        words = f"the job ended as {seen.state}" + (
            f" ({seen.reason})" if seen.reason not in ("None", "") else ""
        )
        if saved and seen.state in ("TIMEOUT", "PREEMPTED"):
            return Verdict("stopped", SAVED, f"{words}, state saved", seen.state)
        return Verdict("failed", STAND[seen.state], words, seen.state)
    if status is not None and status.get("state") in TERMINAL:
        return Verdict(str(status["state"]), int(status["exit_code"]), None)
    if seen is not None and waited >= SILENT:
        words = f"the job ended as {seen.state} and left no status; its log is in the scheduler's folder"
        return Verdict("failed", code or 1, words, seen.state)
    if seen is None and waited >= UNKNOWN:
        return Verdict("failed", LOST, "the scheduler does not know the job any more", "LOST")
    return None


def read_squeue(text: str) -> dict[str, Seen]:
    """The lines of `squeue -h -r -o '%i|%T|%r'` by job id."""
    rows = [line.strip().split("|", 2) for line in text.splitlines() if line.count("|") >= 2]
    return {row[0]: Seen("HELD" if HELD.search(row[2]) else row[1], row[2]) for row in rows}


def job_id(run: Path) -> str | None:
    """The id of the run's job; None before it has one."""
    number = (read_json(run / "job.json") or {}).get("id")
    return None if number is None else str(number)


def read_code(text: str) -> int:
    """The batch script's exit code in what `scontrol show job` says, `ExitCode=c:s`; 1 without it."""
    found = re.search(r"\bExitCode=(\d+):(\d+)", text)
    if found is None:
        return 1
    return exit_code(-int(found[2])) if int(found[2]) else int(found[1])


def own_id(shell: Mapping[str, str]) -> str | None:
    """The id of the job, or of the task of an array, that this process is a part of, as squeue writes it."""
    if "SLURM_ARRAY_JOB_ID" in shell:
        return f"{shell['SLURM_ARRAY_JOB_ID']}_{shell['SLURM_ARRAY_TASK_ID']}"
    return shell.get("SLURM_JOB_ID")


def seconds_of(text: str) -> int | None:
    """`D-HH:MM:SS` with its leading parts left out where they are 0, as squeue prints it."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if match is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def ask(*command: str) -> subprocess.CompletedProcess[str] | None:
    """Run a command of the scheduler; None if it is missing or does not answer."""
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
