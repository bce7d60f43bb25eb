"""The only file that knows submitit: it writes the batch script and submits it (SLURM, PLAN-4).

A job is told one thing, its run directory. submitit's own results, states, signals and requeue are not used.
"""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.slurm import slurm

from src.errors import UserError
from src.launchers.container import ContainerPlan
from src.launchers.flags import Flag
from src.launchers.node import run_node
from src.launchers.ranks import UNMOVED
from src.launchers.scheduler import outside_of_jobs

NAMED = set(inspect.signature(slurm._make_sbatch_string).parameters)
"""Parameters that submitit has a name for; any other flag is an additional one."""
NUMBERS = ("nodes", "ntasks_per_node", "cpus_per_task", "gpus_per_node")


class Executor(slurm.SlurmExecutor):
    """Needs no Slurm to write a script: a dry run works anywhere."""

    agent: str | None = None
    """What srun starts in place of submitit's own command, which wants submitit in the image of pyxis."""
    is_signalled: bool = True
    """Whether the job is told of its limit; submitit asks for that whatever its parameters say."""

    @property
    def _submitit_command_str(self) -> str:
        return self.agent or str(super()._submitit_command_str)

    @classmethod
    def affinity(cls) -> int:
        """Always usable."""
        return 2

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        text = str(super()._make_submission_file_text(command, uid))
        if self.is_signalled:
            return text
        return "\n".join(line for line in text.split("\n") if not line.startswith("#SBATCH --signal="))

    def script(self, tasks: int) -> str:
        """The script that submitting `tasks` runs hands to sbatch."""
        before = dict(self.parameters)
        if tasks > 1:
            self.parameters["map_count"] = tasks
        text = self._make_submission_file_text(self._submitit_command_str, "")
        self.parameters = before
        return text


def executor(
    folder: Path,
    flags: Sequence[Flag],
    runs: Sequence[Path],
    code: Path,
    side_by_side: int | None,
    container: ContainerPlan | None = None,
) -> Executor:
    """An executor whose jobs are the given runs, in this order.

    Args:
        folder: for scripts and logs.
        flags: of sbatch.
        runs: run directories.
        code: the snapshot that jobs import.
        side_by_side: most tasks of an array that run at the same time; None for no limit.
        container: of the runs; only pyxis is a matter of the script, for others the agent starts a runtime.
    """
    unmoved = shlex.join(UNMOVED)
    made = Executor(folder, max_num_timeout=0, python=f"{unmoved} {shlex.quote(sys.executable)}")
    wrapping: list[str] = []
    if container is not None and container.runtime == "pyxis":
        wrapping = shlex.split(container.command)
        made.agent = f'{unmoved} {shlex.quote(container.python)} -m src.launchers.node "$run"'
    named = {flag.name.replace("-", "_"): flag for flag in flags}
    made.is_signalled = "signal" in named
    parameters: dict[str, Any] = {"time": None, "wckey": None, "stderr_to_stdout": True}
    parameters |= {name: parameter(name, flag) for name, flag in named.items() if name in NAMED}
    others = {flag.name: parameter(name, flag) for name, flag in named.items() if name not in NAMED}
    cores = [f"--cpus-per-task={flag.value}" for flag in flags if flag.name == "cpus-per-task"]
    made.update_parameters(
        **parameters,
        additional_parameters=others,
        setup=setup(runs, code),
        teardown=teardown(),
        srun_args=[*cores, "--kill-on-bad-exit=1", *wrapping],
        array_parallelism=side_by_side or len(runs),
    )
    return made


def parameter(name: str, flag: Flag) -> Any:
    """A flag's value as submitit takes it."""
    return True if flag.value == "true" else int(flag.value) if name in NUMBERS else flag.value


def setup(runs: Sequence[Path], code: Path) -> list[str]:
    """What the batch shell does before the step: the run of this task, the code, `batch.py start`."""
    table = " ".join(shlex.quote(str(run)) for run in runs)
    return [
        f"runs=({table})",
        'run="${runs[${SLURM_ARRAY_TASK_ID:-0}]}"',
        f'export PYTHONPATH={shlex.quote(str(code))}"${{PYTHONPATH:+:$PYTHONPATH}}" PYTHONSAFEPATH=1',
        f'{batch()} start "$run" || exit',
    ]


def teardown() -> list[str]:
    """What it does afterwards: the code of the job is what `batch.py finish` says."""
    return [f'{batch()} finish "$run" --step $?', "exit"]


def batch() -> str:
    """The command of the batch side."""
    return f"{shlex.quote(sys.executable)} -m src.launchers.batch"


def submit(made: Executor, runs: Sequence[Path]) -> list[str]:
    """Submit one task a run and return the job ids; raises UserError (5) with what sbatch said."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    with outside_of_jobs():
        try:
            jobs = made.map_array(run_node, [str(run) for run in runs])
        except (FailedJobError, FailedSubmissionError, OSError) as error:
            raise UserError(f"sbatch did not take the job: {error}", code=5) from error
    return [str(job.job_id) for job in jobs]
