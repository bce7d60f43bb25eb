"""Spur, a scheduler with Slurm's commands and its own mind: known by what it says, never by its name (SPUR).

Its commands' exit codes mean little, so what they were to do is looked at afterwards (SPUR-7).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from src.code_identity import code_record
from src.config import Config
from src.errors import UserError
from src.launchers import spur_capabilities
from src.launchers.scheduler import Seen, ask, outside_of_jobs, read_code, read_squeue, seconds_of
from src.launchers.snapshot import place
from src.launchers.spur_flags import exports
from src.launchers.spur_script import SCRIPT, script
from src.records import read_json, write_json

if TYPE_CHECKING:
    from src.launchers.plan import LaunchPlan

COMES_BACK = ("PREEMPTED", "REQUEUED")
"""States that end a run of a job, not the job: it waits again a moment later."""


class Spur:
    """See `Scheduler`."""

    name = "Spur"
    folder = "spur"
    has_arrays = False

    def need(self) -> None:
        """See `Scheduler`."""
        spur_capabilities.probe()
        number = os.environ.get("SPUR_JOB_ID")
        if number is not None:
            fix = "type launcher=local, or submit from outside"
            raise UserError(f"launcher=spur inside of job {number}: {fix}")

    def script(self, config: Config, plans: Sequence[LaunchPlan]) -> str:
        """See `Scheduler`."""
        code = place(Path(config.paths.runs), code_record())
        return "\n".join(self._script(plan, Path(plan.run_directory), config, code) for plan in plans)

    def _script(self, plan: LaunchPlan, run: Path, config: Config, code: Path) -> str:
        return script(plan.flags, plan.nodes, run, run / self.folder, code, exports(config))

    def submit(
        self, folder: Path, plans: Sequence[LaunchPlan], paths: Sequence[Path], code: Path, most: int | None
    ) -> list[str]:
        """See `Scheduler`: one job a run, its script and log in the run's own directory."""
        from src.compose import load_config

        ids = []
        for plan, run in zip(plans, paths, strict=True):
            (run / self.folder).mkdir(exist_ok=True)
            text = self._script(plan, run, load_config(run / "config.yaml"), code)
            (run / self.folder / SCRIPT).write_text(text, encoding="utf-8")
            ids.append(submit(run / self.folder / SCRIPT))
        return ids

    def most_tasks(self) -> int:
        """See `Scheduler`: arrays cannot be followed, for their tasks' ids are not told."""
        return 1

    def look(self, ids: Iterable[str]) -> dict[str, Seen] | None:
        """See `Scheduler`. An id that is no number would list all jobs."""
        numbers = sorted({number for number in ids if number.isdecimal()}, key=int)
        if not numbers:
            return {}
        done = ask("squeue", "-h", "-t", "all", "-j", ",".join(numbers), "-o", "%i|%T|%r")
        if done is None or done.returncode != 0:
            return None
        seen = read_squeue(done.stdout)
        return {
            number: Seen("PENDING", line.state) if line.state in COMES_BACK else line
            for number, line in seen.items()
        }

    def time_left(self, number: str) -> int | None:
        """See `Scheduler`; Spur tells the limit and what is used of it."""
        done = ask("squeue", "-h", "-t", "all", "-j", number, "-o", "%l|%M") if number.isdecimal() else None
        said, _, used = ("" if done is None else done.stdout.strip()).partition("|")
        limit, elapsed = seconds_of(said), seconds_of(used)
        return None if limit is None or elapsed is None else limit - elapsed

    def cancel(self, ids: Iterable[str]) -> None:
        """See `Scheduler`."""
        ask("scancel", *sorted(set(ids)))

    def requeue(self, run: Path, number: str) -> bool:
        """See `Scheduler`. Up to 0.8.0 `scontrol requeue` cancels: the same script becomes another job."""
        if "requeuehold" in spur_capabilities.said("scontrol", "--help"):
            done = ask("scontrol", "requeue", number)
            return done is not None and done.returncode == 0
        try:
            again = submit(run / self.folder / SCRIPT)
        except UserError:
            return False
        write_json(run / "job.json", {**(read_json(run / "job.json") or {}), "id": again})
        return True

    def code(self, number: str) -> int:
        """See `Scheduler`."""
        done = ask("scontrol", "show", "job", number)
        return read_code(done.stdout if done is not None else "")


def submit(path: Path) -> str:
    """Submit a script and return the job's id; raises UserError (5) with what sbatch said."""
    with outside_of_jobs():
        done = ask("sbatch", "--parsable", str(path))
    said = "no answer" if done is None else (done.stderr or done.stdout).strip()
    number = "" if done is None else done.stdout.strip()
    if done is None or done.returncode != 0 or not number.isdecimal():
        raise UserError(f"sbatch did not take the job: {said}", code=5)
    return number
