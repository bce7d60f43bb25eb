"""One job on Slurm, from a validated config to its exit code: submit, or find it again, and follow (SLURM).

The launching process trains nothing and holds the run directory only while it submits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from src import runs
from src.code_identity import CodeRecord, code_record
from src.config import Config
from src.digest import config_digest
from src.launchers.follow import Follower, is_over
from src.launchers.launch import (
    Launch,
    check_log_copy,
    finish,
    guarded,
    log_files,
    papers,
    prepare_for,
)
from src.launchers.plan import LaunchPlan, check_memory, make_plan
from src.launchers.ranks import WORKER
from src.launchers.scheduler import need_slurm
from src.launchers.settle import fail
from src.launchers.snapshot import place, snapshot
from src.launchers.storage import check_storage
from src.machine import find_machine
from src.records import read_json, write_json
from src.runs import Claim
from src.status import Status, read_status

FOLDER = "slurm"
"""Scripts and logs of the scheduler, in a run's or a sweep's directory."""


@dataclass(frozen=True)
class JobRecord:
    """`job.json`: what a run's job is and what its nodes run."""

    worker: str
    code: str
    """The snapshot that it imports."""
    data_attempt: str
    """What it builds data for, if it does: jobs of one submission fail together (LEASE-7)."""
    id: str | None = None
    """The scheduler's, once it has one."""


def run_job(config: Config, overrides: list[str], worker: str = WORKER) -> int:
    """Submit one run, wait for it and return its own exit code (EXIT); refusals are printed, not raised."""
    return guarded(Launch(pinned(config), overrides, worker), find_and_follow)


def pinned(config: Config) -> Config:
    """The config with the platform that the nodes' ranks must take, whatever devices they find."""
    return replace(config, platform=replace(config.platform, name=find_machine(config).platform))


def find_and_follow(launch: Launch) -> int:
    """Find the run's directory and its job, submit where there is none, and follow it to its end."""
    console = launch.console
    need_slurm()
    check_storage(launch.config)
    with console.phase("plan"):
        plan = make_plan(launch.config, launch.overrides)
        check_memory(plan)
        check_log_copy(launch.config)
    with console.phase("run") as words:
        code = code_record()
        found = runs.find(launch.config, code, plan.data_key)
        words.append(str(found.path))
    for note in found.notes:
        console.line(note)
    if found.finished:
        return 0
    console.line(f"metrics    {found.path / 'metrics.jsonl'}")
    number = living_job(found.path)
    if number is None:
        number = submit_one(launch, found, plan, code)
    else:
        log_files(launch, found.path)
        console.line(f"job        {number} was submitted before: following it")
    if not launch.config.launcher.wait:
        console.line(f"not waiting for job {number}; the same command without launcher.wait=false follows it")
        return 0
    return follow(launch, found.path, number)


def living_job(run: Path) -> str | None:
    """The id of the run's job if it waits or runs; None if there is none any more."""
    number = (read_json(run / "job.json") or {}).get("id")
    state = (read_status(run) or {}).get("state")
    if number is None or state not in ("queued", "running"):
        return None
    return None if is_over(str(number)) else str(number)


def submit_one(launch: Launch, found: Claim, plan: LaunchPlan, code: CodeRecord) -> str:
    """Write the run's papers, prepare data, submit; the directory is held meanwhile. Returns the job's id."""
    taken = runs.take(found, launch.config)
    try:
        other = living_job(taken.path)
        if other is not None:
            launch.console.line(f"job        {other} was submitted by another command: following it")
            return other
        copy = snapshot(Path(launch.config.paths.runs), code)
        attempt = f"{taken.path}#{taken.attempt}"
        status = open_attempt(launch, taken, plan, code, copy, attempt)
        if launch.config.data.prepare.where != "job":
            prepare_for(launch, taken.path, status)
        with launch.console.phase("submit") as words, launch.signals.collected():
            (number,) = submit_runs(taken.path / FOLDER, [plan], [taken.path], copy)
            words.append(f"job {number}")
        return number
    finally:
        taken.release()


def open_attempt(
    launch: Launch, taken: Claim, plan: LaunchPlan, code: CodeRecord, copy: Path, data_attempt: str
) -> Status:
    """Write the papers of an attempt that a job will make, and say that it is queued."""
    files = papers(launch, plan, None, code, plan.data_key)
    record = JobRecord(launch.worker, str(copy), data_attempt)
    files["job.json"] = json.dumps(asdict(record), indent=2) + "\n"
    runs.begin_attempt(taken, files)
    log_files(launch, taken.path)
    status = Status("queued", taken.attempt, config_digest(launch.config))
    status.write(taken.path)
    return status


def submit_runs(
    folder: Path,
    plans: Sequence[LaunchPlan],
    paths: Sequence[Path],
    code: Path,
    side_by_side: int | None = None,
) -> list[str]:
    """Submit runs that ask for the same resources as one array, and note each one's id in its directory.

    Raises:
        UserError: sbatch refuses (5); then the runs are failed with its words.
    """
    from src.errors import UserError
    from src.launchers.submit import executor, submit

    folder.mkdir(parents=True, exist_ok=True)
    made = executor(folder, plans[0].flags, paths, code, side_by_side)
    try:
        ids = submit(made, paths)
    except UserError as error:
        for path in paths:
            refuse(path, error.code, str(error))
        raise
    for path, number in zip(paths, ids, strict=True):
        write_json(path / "job.json", {**(read_json(path / "job.json") or {}), "id": number})
    return ids


def refuse(run: Path, code: int, message: str) -> None:
    """The run's job was never queued."""
    status = Status.read(run)
    assert status is not None
    fail(status, code, "UserError", message)
    status.ended = time.time()
    status.write(run)


def script_of(config: Config, plans: Sequence[LaunchPlan]) -> str:
    """The batch script that these runs would be submitted with; writes nothing and needs no Slurm."""
    from src.launchers.submit import executor

    paths = [Path(plan.run_directory) for plan in plans]
    folder = (paths[0] if config.sweep.name is None else paths[0].parent) / FOLDER
    code = place(Path(config.paths.runs), code_record())
    return executor(folder, plans[0].flags, paths, code, side_by_side(config)).script(len(paths))


def side_by_side(config: Config) -> int | None:
    """Most jobs of an array at the same time: `launcher.parallel`, `auto` for no limit."""
    return None if config.launcher.parallel == "auto" else int(config.launcher.parallel)


def follow(launch: Launch, run: Path, number: str) -> int:
    """Show the run until its job has ended, report, and return its code."""
    status = Follower(launch, run, number).follow()
    if status is None:
        return 130
    finish(launch, run, status)
    assert status.exit_code is not None
    return status.exit_code
