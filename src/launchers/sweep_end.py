"""What became of the jobs of a sweep: value, table, exit code, and the papers of one that never started."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from src import runs
from src.code_identity import code_record
from src.digest import config_digest
from src.launchers.jobs import Job
from src.launchers.launch import Launch, papers
from src.launchers.settle import fail
from src.report import show, table
from src.report_facts import read_run, row
from src.status import Status


def leave_failure(job: Job, code: int, kind: str, message: str) -> Path:
    """The papers and the failed `status.json` of an attempt that never started; returns its directory."""
    assert job.plan is not None
    record = code_record()
    claim = runs.claim(job.config, record, job.data_key)
    try:
        files = papers(Launch(job.config, job.overrides), job.plan, None, record, job.data_key)
        runs.begin_attempt(claim, files)
        status = Status("failed", claim.attempt, config_digest(job.config), ended=time.time())
        fail(status, code, kind, message)
        status.write(claim.path)
    finally:
        claim.release()
    return claim.path


def objective(job: Job) -> float:
    """The value of `sweep.objective` of a job that is done; nan of another, or where there is none."""
    if job.state != "done" or job.path is None:
        return math.nan
    value = row(read_run(job.path))[job.config.sweep.objective]
    return math.nan if value is None else float(value)


def summary(jobs: Sequence[Job]) -> str:
    """The table of the jobs: swept values, state, code, steps, losses, speed; then reasons of failures."""
    numbers = ("steps", "last_loss", "heldout_loss", "tokens_per_s")
    rows = []
    for job in jobs:
        has_run = job.path is not None and (job.path / "config.yaml").is_file()
        facts = row(read_run(job.path)) if has_run and job.path is not None else {}
        cells = [*job.swept.values(), job.state, show(job.code), *(show(facts.get(name)) for name in numbers)]
        rows.append([*cells, job.path.name if job.path else "-"])
    text = table([*jobs[0].swept, "state", "code", *numbers, "directory"], rows)
    reasons = [f"{job.name}: {job.reason}" for job in jobs if job.reason]
    return "\n".join([text, *reasons])


def sweep_code(jobs: Sequence[Job], signals: Sequence[int]) -> int:
    """The first failed job's code in sweep order; else 75 if some stopped, 130 after Ctrl-C (EXIT-2)."""
    failed = [job.code for job in jobs if job.state == "failed" and job.code]
    if failed:
        return failed[0]
    if all(job.state == "done" for job in jobs):
        return 0
    return 130 if 2 in signals else 75
