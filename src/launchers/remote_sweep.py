"""A multirun on a scheduler: data prepared once, jobs submitted and followed, one table (SLURM-5, SPUR-6)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

from src import runs
from src.code_identity import CodeRecord, code_record
from src.errors import UserError
from src.launchers.bar import Progress
from src.launchers.console import Console
from src.launchers.follow import Queue, write_verdict
from src.launchers.jobs import Job, data_failure
from src.launchers.launch import Launch, check_log_copy
from src.launchers.plan import LaunchPlan, check_memory, dry_run_text
from src.launchers.remote import living_job, open_attempt, side_by_side, submit_runs
from src.launchers.scheduler import Scheduler, job_id
from src.launchers.schedulers import scheduler_of
from src.launchers.snapshot import snapshot
from src.launchers.sweep import Sweep, plan_jobs
from src.machine import pinned
from src.report import write_report

MOST_LINES = 16
"""Running jobs that have a line of their own on a terminal."""


def run_remote_sweep(jobs: list[Job], worker: str) -> int:
    """Submit all jobs of a multirun, follow them, and return the sweep's exit code (EXIT-2).

    Args:
        jobs: checked, in sweep order.
        worker: module that a rank runs.
    """
    for job in jobs:
        job.config = pinned(job.config)
    plans = plan_jobs(jobs)
    scheduler = scheduler_of(jobs[0].config)
    if jobs[0].config.dry_run:
        for group in groups(plans):
            print(scheduler.script(jobs[0].config, [plans[k] for k in group]))
        for plan in plans:
            print(dry_run_text(plan))
        return 0
    scheduler.need()
    for job, plan in zip(jobs, plans, strict=True):
        check_memory(plan)
        check_log_copy(job.config)
        job.plan, job.data_key = plan, plan.data_key
        job.builds_data = job.config.data.prepare.where == "job"
    kind = ArraySweep if scheduler.has_arrays else SingleSweep
    return kind(jobs, plans, scheduler, worker).run()


def groups(plans: Sequence[LaunchPlan], most: int | None = None) -> list[list[int]]:
    """Places of plans that ask for the same, in sweep order: one array each, of `most` tasks or fewer."""
    found: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for place, plan in enumerate(plans):
        asked = [(flag.name, flag.value) for flag in plan.flags]
        if plan.container is not None and plan.container.runtime == "pyxis":
            asked.append((plan.container.python, plan.container.command))
        found.setdefault(tuple(asked), []).append(place)
    size = most or len(plans)
    return [group[k : k + size] for group in found.values() for k in range(0, len(group), size)]


class RemoteSweep(Sweep):
    """Jobs on their way through the queue; `running` means submitted."""

    def __init__(
        self, jobs: list[Job], plans: Sequence[LaunchPlan], scheduler: Scheduler, worker: str
    ) -> None:
        super().__init__(jobs, worker)
        self._plans = {job.name: plan for job, plan in zip(jobs, plans, strict=True)}
        self._scheduler = scheduler
        self._queue = Queue(scheduler, [])
        self._interrupted = False
        self._attempt = f"{self._directory}#{uuid.uuid4().hex}"

    def _where(self) -> str:
        return f"on {self._scheduler.name}"

    def _drawn(self) -> list[Job]:
        return [job for job in self._running() if job.progress is not None and job.progress.last][:MOST_LINES]

    def _find_directory(self, job: Job, code: CodeRecord) -> None:
        """As locally; a job that waits or runs is followed instead of submitted again."""
        super()._find_directory(job, code)
        is_open = job.state == "queued" and job.path is not None
        number = living_job(self._scheduler, job.path) if is_open and job.path is not None else None
        if number is not None:
            self._console.line(f"{job.name}  was submitted before as job {number}: following it")
            self._followed(job)

    def _followed(self, job: Job) -> None:
        assert job.path is not None
        job.state, job.started = "running", time.monotonic()
        job.progress = Progress(job.path / "metrics.jsonl", job.config.max_steps, resumed=True)
        self._queue.runs.append(job.path)

    def _submit(self, group: list[Job]) -> None:
        """One array; what sbatch refuses fails the jobs in it and no other."""
        code = code_record()
        copy = snapshot(Path(self._config.paths.runs), code)
        claims = list(self._claim(group, code))
        taken = [(job, claim) for job, claim in claims if not claim.finished]
        try:
            for job, claim in taken:
                launch = Launch(job.config, job.overrides, self._worker, console=Console())
                open_attempt(launch, claim, self._plans[job.name], code, copy, self._attempt)
            self._submit_claimed(taken, copy)
        except UserError as error:
            for job, _ in taken:
                job.end("failed", error.code, str(error))
                self._ended(job)
        finally:
            for _, claim in claims:
                claim.release()

    def _claim(self, group: list[Job], code: CodeRecord) -> Iterator[tuple[Job, runs.Claim]]:
        for job in group:
            try:
                claim = runs.claim(job.config, code, job.data_key)
            except UserError as error:
                job.end("failed", error.code, str(error))
                self._ended(job)
                continue
            job.path = claim.path
            other = None if claim.finished else living_job(self._scheduler, claim.path)
            if other is not None:
                claim.release()
                self._followed(job)
                continue
            if claim.finished:
                job.end("done", 0)
            yield job, claim

    def _submit_claimed(self, taken: list[tuple[Job, runs.Claim]], copy: Path) -> None:
        if not taken:
            return
        plans = [self._plans[job.name] for job, _ in taken]
        paths = [claim.path for _, claim in taken]
        folder = self._directory / self._scheduler.folder
        ids = submit_runs(self._scheduler, folder, plans, paths, copy, side_by_side(self._config))
        many = f"{ids[0]} to {ids[-1]}" if len(ids) > 1 else ids[0]
        self._console.line(f"submitted  {len(ids)} jobs on {plans[0].mesh['spec']} as {many}")
        for (job, _), number in zip(taken, ids, strict=True):
            self._followed(job)
            if not self._config.launcher.wait:
                job.end("stopped", 0, f"not waited for: job {number}")

    def _look_at_jobs(self) -> None:
        self._queue.look(soon=self._interrupted)
        for job in self._running():
            assert job.progress is not None
            assert job.path is not None
            for _ in job.progress.read():
                pass
            verdict = self._queue.verdict(job.path)
            if verdict is not None:
                status = write_verdict(job.path, verdict, self._interrupted)
                job.end(status.state, status.exit_code, status.why)
                self._report_run(job.path)
                self._ended(job)

    def _report_run(self, run: Path) -> None:
        """The run's own report; nobody else writes one for a job."""
        try:
            write_report(run)
        except Exception as error:
            self._console.line(f"no report of {run.name}: {type(error).__name__}: {error}")

    def _look_for_stop(self) -> None:
        """Ctrl-C cancels all jobs, or leaves them alone; a second one does not wait for them (SWEEP-6)."""
        came = len(self._signals.came)
        if came and not self._interrupted:
            self._interrupted = True
            self._cancel("stopped before it was submitted")
            if self._config.launcher.on_interrupt == "cancel":
                self._console.line("stopping: all jobs are cancelled; once more leaves at once")
                self._scheduler.cancel(filter(None, map(self._id, self._running())))
            else:
                self._leave("left running as job {}")
        elif came > 1:
            self._leave("job {} was cancelled, its end not waited for")

    def _leave(self, words: str) -> None:
        for job in self._running():
            job.end("stopped", None, words.format(self._id(job)))

    def _stop(self, job: Job, number: int) -> None:
        self._scheduler.cancel(filter(None, [self._id(job)]))

    @staticmethod
    def _id(job: Job) -> str | None:
        """The id of its job now."""
        return None if job.path is None else job_id(job.path)


class ArraySweep(RemoteSweep):
    """All jobs at once, those that ask for the same as one array."""

    def _start_jobs(self, data: dict[str, Future[None]], scratch: Path) -> None:
        """Submit everything at once, when the last data key is there or has failed (SWEEP-2)."""
        waiting = [job for job in self._jobs if job.state == "queued"]
        if not waiting or not all(future.done() for future in data.values()):
            return
        for job in waiting:
            failure = data_failure(None if job.data_key is None else data.get(job.data_key))
            if failure is not None:
                self._fail_before_start(job, *failure)
        ready = [job for job in waiting if job.state == "queued"]
        for places in groups([self._plans[job.name] for job in ready], self._scheduler.most_tasks()):
            self._submit([ready[k] for k in places])


class SingleSweep(RemoteSweep):
    """A job for each run as soon as its data is there, `launcher.parallel` of them side by side (SPUR-6)."""

    def _start_jobs(self, data: dict[str, Future[None]], scratch: Path) -> None:
        most = side_by_side(self._config)
        for job in [job for job in self._jobs if job.state == "queued"]:
            future = None if job.data_key is None else data.get(job.data_key)
            if future is not None and not future.done():
                continue
            failure = data_failure(future)
            if failure is not None:
                self._fail_before_start(job, *failure)
            elif most is None or len(self._running()) < most:
                self._submit([job])
