"""A multirun on this machine: all jobs composed first, data prepared once, slots kept full (SWEEP)."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig

from src import runs
from src.code_identity import CodeRecord, code_record
from src.compose import compose_jobs
from src.config import Config
from src.digest import config_digest
from src.errors import Problem, UserError
from src.launchers.bar import Display
from src.launchers.console import Console, clock, show_result
from src.launchers.environment import cores
from src.launchers.jobs import (
    ENDED,
    Job,
    data_failure,
    look_at,
    make_jobs,
    prepare_data,
    signal_job,
    start_job,
)
from src.launchers.launch import Launch, check_log_copy, papers
from src.launchers.plan import LaunchPlan, check_memory, dry_run_text, make_plan
from src.launchers.ranks import WORKER
from src.launchers.settle import fail
from src.launchers.storage import check_storage
from src.launchers.watch import LOOK, Signals
from src.machine import HIDING, find_machine
from src.report import comparison, show, table, write_report
from src.report_facts import find_runs, groups, read_run, row
from src.status import Status
from src.trainer.data.keys import Corpora


def run_sweep(
    loader: ConfigLoader, master: DictConfig, overrides: list[list[str]], worker: str = WORKER
) -> int:
    """Run all jobs of a multirun and return the sweep's exit code (EXIT-2).

    Args:
        loader: Hydra's, which composes the jobs.
        master: the composed config of the multirun, with Hydra's own part.
        overrides: of each job, in sweep order.
        worker: module that a rank runs.

    Raises:
        UserError: an item does not compose, or the items want different launchers (2), or do not fit (3).
    """
    configs = compose_jobs(loader, overrides)
    check_one_launcher(configs)
    check_storage(configs[0])
    if configs[0].launcher.name == "slurm":
        from src.launchers.slurm_sweep import run_slurm_sweep

        return run_slurm_sweep(
            configs, overrides, [str(text) for text in master.hydra.overrides.task], worker
        )
    jobs = make_jobs(configs, overrides, [str(text) for text in master.hydra.overrides.task])
    plans = plan_jobs(jobs)
    if configs[0].dry_run:
        for plan in plans:
            show_result(dry_run_text(plan))
        return 0
    for job, plan in zip(jobs, plans, strict=True):
        check_memory(plan)
        check_log_copy(job.config)
        job.plan, job.data_key = plan, plan.data_key
    return Sweep(jobs, worker).run()


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
        self._devices = free_devices(self._config)
        self._slots = self._config.launcher.slots or (len(self._devices) if self._devices else cores())
        self._passed_on = 0

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
        if self._devices:
            taken = {name for other in self._running() for name in other.devices or []}
            job.devices = [name for name in self._devices if name not in taken][: job.config.mesh.world]
        start_job(job, scratch, self._beside(job), self._worker)

    def _beside(self, job: Job) -> int:
        """Jobs like this one side by side: max(1, slots / world), or `launcher.parallel` (LOCAL-3)."""
        if job.config.launcher.parallel != "auto":
            return int(job.config.launcher.parallel)
        return max(1, self._slots // job.config.mesh.world)

    def _has_room(self, job: Job) -> bool:
        running = self._running()
        if not running:
            return True
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


def free_devices(config: Config) -> list[str]:
    """Names of the GPUs that jobs may share out; empty on a CPU."""
    machine = find_machine(config)
    if machine.platform == "cpu":
        return []
    shown = next((os.environ[name] for name in HIDING if name in os.environ), None)
    names = [str(k) for k in range(machine.devices)] if shown is None else shown.split(",")
    return names[: machine.devices]


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
