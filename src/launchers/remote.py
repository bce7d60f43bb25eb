"""One job of a scheduler, from a validated config to its exit code: submit, or find it again, and follow.

The launching process trains nothing and holds the run directory only while it submits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from src import runs
from src.code_identity import CodeRecord, code_record
from src.config import Config
from src.digest import config_digest
from src.errors import UserError
from src.launchers.follow import Follower, is_over
from src.launchers.launch import (
    Launch,
    check_log_copy,
    check_tuning,
    finish,
    guarded,
    log_files,
    papers,
    prepare_for,
)
from src.launchers.plan import LaunchPlan, check_memory, make_plan
from src.launchers.ranks import WORKER
from src.launchers.scheduler import Scheduler, job_id
from src.launchers.schedulers import scheduler_of
from src.launchers.settle import fail
from src.launchers.snapshot import snapshot
from src.launchers.storage import check_storage
from src.machine import pinned
from src.records import read_json, write_json
from src.runs import Claim
from src.status import Status, read_status


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


def find_and_follow(launch: Launch) -> int:
    """Find the run's directory and its job, submit where there is none, and follow it to its end."""
    console, scheduler = launch.console, scheduler_of(launch.config)
    scheduler.need()
    check_storage(launch.config)
    with console.phase("plan"):
        plan = make_plan(launch.config, launch.overrides)
        check_memory(plan)
        check_log_copy(launch.config)
        check_tuning(launch.config)
    with console.phase("run") as words:
        code = code_record()
        found = runs.find(launch.config, code, plan.data_key)
        words.append(str(found.path))
    for note in found.notes:
        console.line(note)
    if found.finished:
        return 0
    console.line(f"metrics    {found.path / 'metrics.jsonl'}")
    number = living_job(scheduler, found.path)
    if number is None:
        number = submit_one(launch, scheduler, found, plan, code)
    else:
        log_files(launch, found.path)
        console.line(f"job        {number} was submitted before: following it")
    if not launch.config.launcher.wait:
        console.line(f"not waiting for job {number}; the same command without launcher.wait=false follows it")
        return 0
    return follow(launch, scheduler, found.path)


def living_job(scheduler: Scheduler, run: Path) -> str | None:
    """The id of the run's job if it waits or runs; None if there is none any more."""
    number = job_id(run)
    state = (read_status(run) or {}).get("state")
    if number is None or state not in ("queued", "running"):
        return None
    return None if is_over(scheduler, number) else number


def submit_one(launch: Launch, scheduler: Scheduler, found: Claim, plan: LaunchPlan, code: CodeRecord) -> str:
    """Write the run's papers, prepare data, submit; the directory is held meanwhile. Returns the job's id."""
    taken = runs.take(found, launch.config)
    try:
        other = living_job(scheduler, taken.path)
        if other is not None:
            launch.console.line(f"job        {other} was submitted by another command: following it")
            return other
        copy = snapshot(Path(launch.config.paths.runs), code)
        attempt = f"{taken.path}#{taken.attempt}"
        status = open_attempt(launch, taken, plan, code, copy, attempt)
        if launch.config.data.prepare.where != "job":
            prepare_for(launch, taken.path, status)
        with launch.console.phase("submit") as words, launch.signals.collected():
            folder = taken.path / scheduler.folder
            (number,) = submit_runs(scheduler, folder, [plan], [taken.path], copy)
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
    scheduler: Scheduler,
    folder: Path,
    plans: Sequence[LaunchPlan],
    paths: Sequence[Path],
    code: Path,
    side_by_side: int | None = None,
) -> list[str]:
    """Submit runs that ask for the same resources together, and note each one's id in its directory.

    Raises:
        UserError: sbatch refuses (5); then the runs are failed with its words.
    """
    try:
        ids = scheduler.submit(folder, plans, paths, code, side_by_side)
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


def side_by_side(config: Config) -> int | None:
    """Most jobs of an array at the same time: `launcher.parallel`, `auto` for no limit."""
    return None if config.launcher.parallel == "auto" else int(config.launcher.parallel)


def follow(launch: Launch, scheduler: Scheduler, run: Path) -> int:
    """Show the run until its job has ended, report, and return its code."""
    status = Follower(launch, scheduler, run).follow()
    if status is None:
        return 130
    finish(launch, run, status)
    assert status.exit_code is not None
    return status.exit_code
