"""Slurm: submitit submits, squeue says how jobs stand (SLURM)."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from src.code_identity import code_record
from src.config import Config
from src.errors import UserError
from src.launchers.scheduler import Seen, ask, read_code, read_squeue, seconds_of
from src.launchers.snapshot import place

if TYPE_CHECKING:
    from src.launchers.plan import LaunchPlan


class Slurm:
    """See `Scheduler`."""

    name = "Slurm"
    folder = "slurm"
    has_arrays = True

    def need(self) -> None:
        """See `Scheduler`."""
        if shutil.which("sbatch") is None:
            fix = "submit from a login node, type launcher=local, or dry_run=true to see the script"
            raise UserError(f"launcher=slurm: there is no sbatch on PATH; {fix}", code=3)
        if "SLURM_JOB_ID" in os.environ:
            number = os.environ["SLURM_JOB_ID"]
            fix = "type launcher=local, or submit from outside"
            raise UserError(f"launcher=slurm inside of job {number}: {fix}")

    def script(self, config: Config, plans: Sequence[LaunchPlan]) -> str:
        """See `Scheduler`."""
        from src.launchers.submit import executor

        paths = [Path(plan.run_directory) for plan in plans]
        folder = (paths[0] if config.sweep.name is None else paths[0].parent) / self.folder
        code = place(Path(config.paths.runs), code_record())
        most = None if config.launcher.parallel == "auto" else int(config.launcher.parallel)
        made = executor(folder, plans[0].flags, paths, code, most, plans[0].container)
        return made.script(len(paths))

    def submit(
        self, folder: Path, plans: Sequence[LaunchPlan], paths: Sequence[Path], code: Path, most: int | None
    ) -> list[str]:
        """See `Scheduler`: one array."""
        from src.launchers.submit import executor, submit

        folder.mkdir(parents=True, exist_ok=True)
        return submit(executor(folder, plans[0].flags, paths, code, most, plans[0].container), paths)

    def look(self, ids: Iterable[str]) -> dict[str, Seen] | None:
        """See `Scheduler`."""
        bases = ",".join(sorted({number.partition("_")[0] for number in ids}))
        done = ask("squeue", "-h", "-r", "-t", "all", "-j", bases, "-o", "%i|%T|%r")
        if done is None:
            return None
        if done.returncode != 0 and "Invalid job id" not in done.stderr:
            return None
        return read_squeue(done.stdout)

    def time_left(self, number: str) -> int | None:
        """See `Scheduler`."""
        done = ask("squeue", "-h", "-j", number, "-o", "%L")
        return None if done is None else seconds_of(done.stdout)

    def cancel(self, ids: Iterable[str]) -> None:
        """See `Scheduler`."""
        ask("scancel", *sorted(set(ids)))

    def requeue(self, run: Path, number: str) -> bool:
        """See `Scheduler`; the job is killed at once (SUB-6)."""
        done = ask("scontrol", "requeue", number)
        return done is not None and done.returncode == 0

    def code(self, number: str) -> int:
        """See `Scheduler`."""
        done = ask("scontrol", "-o", "show", "job", number)
        return read_code(done.stdout if done is not None else "")

    def most_tasks(self) -> int:
        """Most tasks of one array; Slurm's own default where it does not say."""
        done = ask("scontrol", "show", "config")
        found = re.search(r"^MaxArraySize\s*=\s*(\d+)", done.stdout if done is not None else "", re.M)
        return int(found[1]) if found else 1001
