"""The jobs of a sweep: their names, their data, and a process for each (SWEEP-2, SWEEP-5, SWEEP-9)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from src.code_identity import CHECKOUT
from src.compose import dump_config
from src.config import Config
from src.errors import UserError
from src.launchers.bar import Progress
from src.launchers.outcome import exit_code
from src.launchers.plan import LaunchPlan
from src.launchers.ranks import applied
from src.naming import job_name, key_of, sweep_name
from src.report_facts import overrides_text
from src.status import read_status

ENDED = ("done", "stopped", "failed", "cancelled")
"""States that a job does not leave."""


@dataclass(frozen=True)
class Seat:
    """What a job has of this machine while it runs."""

    number: int
    """The lowest that no running job has."""
    beside: int
    """Jobs that share the machine, this one included."""
    variables: dict[str, str] = field(default_factory=dict)
    """What shows it its GPUs."""


@dataclass
class Job:
    """One item of a sweep."""

    config: Config
    """With `sweep.name`, `sweep.job` and `sweep.index` set."""
    overrides: list[str]
    swept: dict[str, str]
    """The swept keys with this job's values."""
    data_key: str | None = None
    """Name of its token artifact, as its plan says; None for synthetic data."""
    plan: LaunchPlan | None = None
    """What its launch will do, as the sweep made it."""
    path: Path | None = None
    """The run directory, once it is known."""
    state: str = "queued"
    """`queued`, `running`, or one of ENDED."""
    code: int | None = None
    reason: str | None = None
    devices: list[str] | None = None
    """The GPUs it has while it runs; None on a CPU."""
    builds_data: bool = False
    """Whether it builds its data itself, on its nodes (`data.prepare.where=job`)."""
    seat: Seat | None = None
    """What else it has of this machine while it runs here."""
    process: subprocess.Popen[bytes] | None = None
    folder: Path | None = None
    progress: Progress | None = None
    started: float = 0.0

    @property
    def name(self) -> str:
        """Its directory's name below the sweep's."""
        assert self.config.sweep.job is not None
        return self.config.sweep.job

    def end(self, state: str, code: int | None, reason: str | None = None) -> None:
        """Settle how it ended."""
        self.state, self.code, self.reason = state, code, reason


def swept_places(overrides: Sequence[str], typed: Sequence[str]) -> list[int]:
    """Places in a job's overrides that the sweep varies; all places where it varies none."""
    parser = OverridesParser.create()
    swept = {key_of(text) for text in typed if parser.parse_override(text).is_sweep_override()}
    places = range(len(overrides))
    return [k for k in places if key_of(overrides[k]) in swept] or list(places)


def make_jobs(
    configs: Sequence[Config], overrides: Sequence[Sequence[str]], typed: Sequence[str], first: int = 0
) -> list[Job]:
    """Name the jobs of a sweep.

    Args:
        configs: as composed, in sweep order.
        overrides: of each job, all of the same keys in the same order.
        typed: the sweep's overrides as they stood on the command line, or in the sweeper's own `params`.
        first: place of the first job in its sweep, for a sweeper that comes with one batch after another.
    """
    places = swept_places(overrides[0], typed)
    keys = {key_of(overrides[0][k]) for k in places}
    name = sweep_name(configs[0], [text for text in typed if key_of(text) in keys])
    jobs = []
    for index, (config, mine) in enumerate(zip(configs, overrides, strict=True), first):
        pairs = [mine[k] for k in places]
        swept = {key_of(pair): pair.partition("=")[2] for pair in pairs}
        sweep = replace(config.sweep, name=name, job=job_name(pairs), index=index, keys=list(swept))
        named = replace(config, sweep=sweep)
        jobs.append(Job(named, list(mine), swept))
    return jobs


def start_job(job: Job, scratch: Path, seat: Seat, worker: str) -> None:
    """Start a job's launching process in a session of its own; its output goes to a file in `scratch`.

    Args:
        job: a queued job.
        scratch: directory of this sweep's temporary files.
        seat: what it has of this machine.
        worker: module that a rank runs.
    """
    job.seat = seat
    job.folder = scratch / job.name
    job.folder.mkdir(exist_ok=True)
    (job.folder / "config.yaml").write_text(dump_config(job.config), encoding="utf-8")
    (job.folder / "overrides.yaml").write_text(overrides_text(job.overrides), encoding="utf-8")
    command = [sys.executable, "-P", "-m", "src.launchers.job", str(job.folder)]
    command += ["--jobs", str(seat.beside), "--seat", str(seat.number), "--worker", worker]
    path = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with applied({"PYTHONPATH": path, **seat.variables}), (job.folder / "output").open("wb") as output:
        job.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    assert job.path is not None
    job.progress = Progress(job.path / "metrics.jsonl", job.config.max_steps, resumed=True)
    job.state, job.started = "running", time.monotonic()


def look_at(job: Job) -> bool:
    """Settle a running job whose process has ended; True if it has."""
    assert job.process is not None
    code = job.process.poll()
    if code is None:
        return False
    code = exit_code(code)
    status = (read_status(job.path) if job.path else None) or {}
    reason = status.get("reason") or {}
    if code == 0:
        job.end("done", 0)
    elif status.get("state") == "stopped" and status.get("exit_code") == code:
        job.end("stopped", code)
    elif status.get("exit_code") == code and reason:
        job.end("failed", code, f"{reason.get('type')}: {reason.get('message')}")
    else:
        job.end("failed", code, last_line(job))
    return True


def last_line(job: Job) -> str:
    """The last thing a job said, for one that left no status."""
    assert job.folder is not None
    lines = (job.folder / "output").read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "ended without a word")


def signal_job(job: Job, number: int) -> None:
    """Pass a stop signal on; the job saves at the first and kills its ranks at the second."""
    if job.process is not None and job.process.poll() is None:
        with suppress(ProcessLookupError):
            job.process.send_signal(signal.Signals(number))


def prepare_data(
    jobs: Sequence[Job], parallel: int, report: Callable[[str], None]
) -> dict[str, Future[None]]:
    """Start to build each data key of the jobs once, at most `parallel` at a time; a job waits for its own.

    The threads are daemons: an interrupted sweep does not wait for them.
    """
    gate = threading.Semaphore(parallel)
    futures: dict[str, Future[None]] = {}

    def work(config: Config, future: Future[None]) -> None:
        from src.trainer.data.prepare import prepare

        with gate:
            try:
                prepared = prepare(config, report)
                report(f"data       {'built' if prepared.built else 'found'} {prepared.path}")
                future.set_result(None)
            except Exception as error:
                future.set_exception(error)

    for job in jobs:
        if job.data_key is not None and not job.builds_data and job.data_key not in futures:
            futures[job.data_key] = Future()
            threading.Thread(target=work, args=(job.config, futures[job.data_key]), daemon=True).start()
    return futures


def data_failure(future: Future[None] | None) -> tuple[int, str, str] | None:
    """Exit code, type and message of a failed preparation; None if it did not fail."""
    error = future.exception() if future is not None and future.done() else None
    if error is None:
        return None
    code = error.code if isinstance(error, UserError) else 4
    return code, type(error).__name__, str(error)
