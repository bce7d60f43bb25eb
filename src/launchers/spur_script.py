"""The batch script of a job of Spur (SPUR-4): pure text.

Spur runs it on the first node only if the word `srun` stands in it unquoted, up to 0.7 on every node whatever
stands in it: the other nodes then hold their share until the job is over, for a step needs the job on them.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from src.launchers.flags import Flag
from src.launchers.spur_flags import lines
from src.launchers.spur_table import INJECTED, THREADS

SCRIPT, LOG = "job.sh", "job.log"
"""In the run's folder `spur`: the script, and what the batch shell, the agents and the step print."""
STEP = 'trap "" TERM USR1 USR2; exec >>"$0" 2>&1; exec "$@"'
"""Spur keeps a step's output until its end, so each agent writes to the log itself; the trap is that of
`ranks.UNMOVED`."""


def script(
    flags: Sequence[Flag],
    nodes: int,
    run: Path,
    folder: Path,
    code: Path,
    exports: Mapping[str, str],
    shell: Mapping[str, str] = os.environ,
) -> str:
    """The text that sbatch takes; it needs no argument and no working directory (PLAN-4).

    Args:
        flags: of sbatch.
        nodes: of the job, each with one task: with more, srun forgets their codes.
        run: its directory, all that the job is told.
        folder: for the log.
        code: the snapshot that the job imports.
        exports: variables set for the job.
        shell: of the command, whose numbers of threads Spur would overwrite.
    """
    log, batch = shlex.quote(str(folder / LOG)), f"{shlex.quote(sys.executable)} -m src.launchers.batch"
    cores = next(flag.value for flag in flags if flag.name == "cpus-per-task")
    agent = f"{shlex.quote(sys.executable)} -m src.launchers.node {shlex.quote(str(run))}"
    places = [Flag("output", str(folder / LOG), ""), Flag("open-mode", "append", "")]
    return "\n".join(
        [
            "#!/bin/bash",
            *lines([*flags, *places]),
            f"unset {' '.join(INJECTED)} MASTER_ADDR MASTER_PORT",
            *[_threads(name, shell.get(name)) for name in THREADS],
            *[f"export {name}={shlex.quote(value)}" for name, value in exports.items()],
            f'export PYTHONPATH={shlex.quote(str(code))}"${{PYTHONPATH:+:$PYTHONPATH}}" PYTHONSAFEPATH=1',
            f"run={shlex.quote(str(run))}",
            f'[ "${{SPUR_NODEID:-0}}" = 0 ] || exec {batch} hold "$run"',
            f'{batch} start "$run" || exit',
            f'{batch} watch "$run" &',
            'trap "kill $! 2>/dev/null" EXIT',
            """trap 'killed=--killed; echo SIGTERM >"$run/control/stop"' TERM""",
            f"srun -N {nodes} -n {nodes} -c {cores} bash -c {shlex.quote(STEP)} {log} {agent}",
            f'{batch} finish "$run" --step $? $killed',
            "exit",
            "",
        ]
    )


def _threads(name: str, value: str | None) -> str:
    return f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
