"""A multirun on this machine: all jobs composed first, data prepared once, slots kept full (SWEEP)."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, OmegaConf

from src import runs
from src.code_identity import CodeRecord, code_record
from src.compose import compose_jobs
from src.config import SCHEDULERS, Config
from src.errors import Problem, UserError
from src.launchers.bar import Display
from src.launchers.console import Console, clock, show_result
from src.launchers.environment import cores
from src.launchers.jobs import (
    ENDED,
    Job,
    Seat,
    data_failure,
    look_at,
    make_jobs,
    prepare_data,
    signal_job,
    start_job,
)
from src.launchers.launch import check_log_copy
from src.launchers.plan import LaunchPlan, check_memory, dry_run_text, make_plan
from src.launchers.ranks import WORKER
from src.launchers.storage import check_storage
from src.launchers.sweep_end import leave_failure, summary, sweep_code
from src.launchers.watch import LOOK, Signals
from src.machine import find_machine, visible
from src.report import comparison, write_report
from src.report_facts import find_runs, groups
from src.trainer.data.keys import Corpora


@dataclass(frozen=True)
class Batch:
    """Jobs that have run, and what they amount to."""

    jobs: list[Job]
    code: int
    """The sweep's exit code as far as these jobs say (EXIT-2)."""


@runtime_checkable
class Runner(Protocol):
    """Hydra's launchers of ours, as a sweeper sees them; Hydra loads each plugin file by itself."""

    code: int
    """Of the first batch that failed; 0 if none did."""

    def run(self, job_overrides: Sequence[Sequence[str]], first: int) -> Batch:
        """Run the jobs with these overrides, the first of them at that place of the sweep."""


def run_sweep(
    loader: ConfigLoader, master: DictConfig, overrides: list[list[str]], worker: str = WORKER
) -> int:
    """Run all jobs of a multirun and return the sweep's exit code (EXIT-2); see `run_batch`."""
    return run_batch(loader, master, overrides, worker).code


def run_batch(
    loader: ConfigLoader, master: DictConfig, overrides: list[list[str]], worker: str = WORKER, first: int = 0
) -> Batch:
    """Run the jobs that a sweeper asks for: all of them, or those of an adaptive one's next step (SWEEP-10).

    Args:
        loader: Hydra's, which composes the jobs.
        master: the composed config of the multirun, with Hydra's own part.
        overrides: of each job, in sweep order.
        worker: module that a rank runs.
        first: place of the first of them in the sweep.

    Raises:
        UserError: an item does not compose, or the items want different launchers (2), or do not fit (3).
    """
    configs = compose_jobs(loader, overrides)
    check_one_launcher(configs)
    check_storage(configs[0])
    jobs = make_jobs(configs, overrides, typed_overrides(master), first)
    if configs[0].launcher.name in SCHEDULERS:
        from src.launchers.remote_sweep import run_remote_sweep

        return Batch(jobs, run_remote_sweep(jobs, worker))
    return Batch(jobs, run_local_sweep(jobs, worker))


def typed_overrides(master: DictConfig) -> list[str]:
    """What the command line says, and what the sweeper's own `params` say."""
    params = OmegaConf.select(master, "hydra.sweeper.params") or {}
    return [
        *(f"{key}={value}" for key, value in params.items()),
        *(str(text) for text in master.hydra.overrides.task),
    ]


def run_local_sweep(jobs: list[Job], worker: str) -> int:
    """Run the jobs on this machine and return their exit code."""
    plans = plan_jobs(jobs)
    if jobs[0].config.dry_run:
        for plan in plans:
            show_result(dry_run_text(plan))
        return 0
    for job, plan in zip(jobs, plans, strict=True):
        check_memory(plan)
        check_log_copy(job.config)
        job.plan, job.data_key = plan, plan.data_key
    sweep = Sweep(jobs, worker)
    sweep.check_parallel()
    return sweep.run()


def plan_jobs(jobs: Sequence[Job]) -> list[LaunchPlan]:
    """The plan of each job; a corpus that several read is looked at once."""
    corpora = Corpora()
    return [make_plan(job.config, job.overrides, corpora=corpora) for job in jobs]


def check_one_launcher(configs: Sequence[Config]) -> None:
    """Refuse items that compose to different launchers: only one can run them (SWEEP-7)."""
    names = sorted({config.launcher.name for config in configs})
    if len(names) > 1:
        fix = "run one sweep per launcher"
        raise UserError([Problem("launcher", f"the items want {', '.join(names)}", fix, "SWEEP-7")])


class Sweep:
    """Jobs on their way through the slots of this machine."""

    def __init__(self, jobs: list[Job], worker: str) -> None:
        self._jobs, self._worker = jobs, worker
        self._config = jobs[0].config
        assert self._config.sweep.name is not None
        self._directory = Path(self._config.paths.runs) / self._config.sweep.name
        self._console, self._signals = Console(), Signals()
        self._shown_by, self._devices = free_devices(self._config)
        self._slots = self._config.launcher.slots or (len(self._devices) if self._devices else cores())
        self._passed_on = 0

    def check_parallel(self) -> None:
        """Raise `UserError` (3) where `launcher.parallel` jobs never have a GPU for each rank (LOCAL-3)."""
        parallel, world = self._config.launcher.parallel, min(job.config.mesh.world for job in self._jobs)
        if parallel == "auto" or not self._devices:
            return
        jobs = min(int(parallel), len(self._jobs))
        if jobs * world > len(self._devices):
            message = f"{jobs} jobs x {world} ranks = {jobs * world} GPUs, {len(self._devices)} are visible"
            fix = f"type launcher.parallel={max(1, len(self._devices) // world)}, or auto"
            raise UserError([Problem("launcher.parallel", message, fix, "LOCAL-3")], code=3)

    def run(self) -> int:
        """Run what is not done yet; a table at the end says how each job went."""
        self._console.line(f"sweep      {self._directory}, {len(self._jobs)} jobs {self._where()}")
        with self._signals.installed(), self._signals.collected():
            code = code_record()
            for job in self._jobs:
                self._find_directory(job, code)
            todo = [job for job in self._jobs if job.state == "queued"]
            data = prepare_data(todo, self._config.sweep.prepare_parallel, self._console.line)
            with (
                tempfile.TemporaryDirectory(prefix="manyhead-sweep-") as name,
                Display(self._console) as display,
            ):
                while any(job.state not in ENDED for job in self._jobs):
                    self._start_jobs(data, Path(name))
                    self._look_at_jobs()
                    self._look_for_stop()
                    display.draw([self._line(job, display.width) for job in self._drawn()])
                    time.sleep(LOOK)
            self._finish()
        return sweep_code(self._jobs, self._signals.came)

    def _where(self) -> str:
        return f"on {self._slots} slots"

    def _find_directory(self, job: Job, code: CodeRecord) -> None:
        """A done job is left byte for byte (SWEEP-4), a refused one fails, another one gets its directory."""
        before = job.path
        try:
            found = runs.find(job.config, code, job.data_key)
        except UserError as error:
            job.end("failed", error.code, str(error))
            self._console.line(f"{job.name}: {error}")
            return
        job.path = found.path
        if found.finished:
            job.end("done", 0)
            self._console.line(f"{job.name}  done before")
            return
        for note in found.notes if found.path != before else []:
            self._console.line(f"{job.name}: {note}")

    def _running(self) -> list[Job]:
        return [job for job in self._jobs if job.state == "running"]

    def _drawn(self) -> list[Job]:
        """Jobs that have a line at the bottom of the terminal."""
        return self._running()

    def _start_jobs(self, data: dict[str, Future[None]], scratch: Path) -> None:
        for job in self._jobs:
            future = None if job.data_key is None else data.get(job.data_key)
            if job.state != "queued" or (future is not None and not future.done()):
                continue
            failure = data_failure(future)
            if failure is not None:
                self._fail_before_start(job, *failure)
            elif self._has_room(job):
                self._start(job, scratch)

    def _fail_before_start(self, job: Job, code: int, kind: str, message: str) -> None:
        """A job whose data cannot be had; its directory says so, as if it had run."""
        job.end("failed", code, f"{kind}: {message}")
        try:
            job.path = leave_failure(job, code, kind, message)
        except (UserError, OSError) as error:
            self._console.line(f"{job.name}: {error}")
        self._ended(job)

    def _start(self, job: Job, scratch: Path) -> None:
        """Start a job in the directory that the code as it is now means, on devices that no other job has."""
        self._find_directory(job, code_record())
        if job.state != "queued":
            return
        start_job(job, scratch, self._seat(job), self._worker)

    def _seat(self, job: Job) -> Seat:
        """Devices and caches that no running job has (LOCAL-3)."""
        used = {other.seat.number for other in self._running() if other.seat is not None}
        number = next(k for k in range(len(used) + 1) if k not in used)
        variables = {}
        if self._devices:
            job.devices = self._free()[: job.config.mesh.world]
            variables = {self._shown_by: ",".join(job.devices)}
        return Seat(number, self._beside(job), variables)

    def _free(self) -> list[str]:
        """GPUs that no running job has."""
        taken = {name for other in self._running() for name in other.devices or []}
        return [name for name in self._devices if name not in taken]

    def _beside(self, job: Job) -> int:
        """Jobs like this one side by side: max(1, slots / world), or `launcher.parallel` (LOCAL-3)."""
        if job.config.launcher.parallel != "auto":
            return int(job.config.launcher.parallel)
        return min(len(self._jobs), max(1, self._slots // job.config.mesh.world))

    def _has_room(self, job: Job) -> bool:
        running = self._running()
        if not running:
            return True
        if self._devices and len(self._free()) < job.config.mesh.world:
            return False
        if job.config.launcher.parallel != "auto":
            return len(running) < self._beside(job)
        return sum(other.config.mesh.world for other in running) + job.config.mesh.world <= self._slots

    def _look_at_jobs(self) -> None:
        for job in self._running():
            assert job.progress is not None
            for _ in job.progress.read():
                pass
            if look_at(job):
                self._ended(job)

    def _ended(self, job: Job) -> None:
        """Say it, replace the report, and stop the rest if `sweep.fail_fast` wants that."""
        seconds = clock(time.monotonic() - job.started) if job.started else "0:00"
        code = "" if job.code in (0, None) else f" with code {job.code}"
        reason = f": {job.reason}" if job.reason else ""
        self._console.line(f"{job.name}  {job.state}{code} after {seconds}{reason}")
        self._report(figure=False)
        if job.state == "failed" and job.config.sweep.fail_fast:
            self._cancel("sweep.fail_fast: a job failed")
            for other in self._running():
                self._stop(other, 15)

    def _cancel(self, reason: str) -> None:
        for job in self._jobs:
            if job.state == "queued":
                job.end("cancelled", None, reason)

    def _look_for_stop(self) -> None:
        """A signal cancels queued jobs and is passed on to running ones: save, then kill (SWEEP-6)."""
        came = self._signals.came
        for number in came[self._passed_on :]:
            self._console.line("stopping: running jobs save, queued ones are cancelled; once more kills")
            self._cancel("stopped before it started")
            for job in self._running():
                self._stop(job, number)
        self._passed_on = len(came)

    def _stop(self, job: Job, number: int) -> None:
        signal_job(job, number)

    def _line(self, job: Job, width: int) -> str:
        assert job.progress is not None
        return job.progress.bar(width, job.name[: max(8, width // 3)])

    def _report(self, figure: bool) -> None:
        """A sweep's report; one that cannot be written stops no job."""
        try:
            write_report(self._directory, figure)
        except Exception as error:
            self._console.line(f"no report: {type(error).__name__}: {error}")

    def _finish(self) -> None:
        if any(job.path is not None and (job.path / "config.yaml").is_file() for job in self._jobs):
            self._report(figure=True)
        self._console.line("\n" + summary(self._jobs))
        self._compare()
        self._console.line(f"report     {self._directory / 'report.md'}")

    def _compare(self) -> None:
        """The groups' means over seeds, and seed by seed, if any group has several."""
        try:
            found, _ = groups(find_runs(self._directory)[0])
            parts = comparison(found) if any(len(group.runs) > 1 for group in found) else []
        except Exception as error:
            parts = [f"no comparison: {type(error).__name__}: {error}"]
        for part in parts:
            self._console.line("\n" + part.removeprefix("## "))


def free_devices(config: Config) -> tuple[str, list[str]]:
    """The variable that shows GPUs, and the names of those that jobs have each for itself; none on a CPU."""
    platform = find_machine(config).platform
    return ("", []) if platform == "cpu" or config.launcher.share_device else visible(platform)
