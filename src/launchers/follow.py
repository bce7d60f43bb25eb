"""Following jobs: the queue beside `status.json`, until both agree that a run has ended (SLURM-2, 6)."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from pathlib import Path

from src.errors import UserError
from src.launchers.bar import Display
from src.launchers.launch import Launch
from src.launchers.scheduler import SILENT, TERMINAL, Scheduler, Seen, Verdict, job_id, merge
from src.launchers.settle import fail
from src.launchers.watch import LOOK, Screen
from src.status import Status, last_step, read_status

OFTEN, MINUTE, SELDOM = 1.0, 60.0, 15.0
"""Seconds between looks at the queue in the first minute, that minute, and the longest pause later."""
DEAF, GIVE_UP = 60.0, 600.0
"""Seconds without an answer of squeue after which `status.json` alone ends a run, and we leave it alone."""
CANCEL_WAIT = 120.0
"""Seconds that a cancelled job may take to leave the queue."""


def is_over(scheduler: Scheduler, number: str) -> bool:
    """Whether a job is neither waiting nor running; a queue that cannot be asked raises UserError (5)."""
    seen = scheduler.look([number])
    if seen is None:
        raise UserError("squeue does not answer: whether the run's job is still there is unknown", code=5)
    return number not in seen or not seen[number].is_alive


LEFT = "job {} is left alone; the same command follows it again"


class Queue:
    """What the queue said last about the jobs of a few runs, and since when it says so.

    A run's job may change: where a scheduler cannot queue a job again, another one takes its place.
    """

    def __init__(self, scheduler: Scheduler, runs: Iterable[Path]) -> None:
        self.runs = list(runs)
        self._scheduler = scheduler
        self._ids: dict[Path, str] = {}
        self._seen: dict[str, Seen] = {}
        self._since: dict[str, float] = {}
        self._started = time.monotonic()
        self._next = 0.0
        self._asked = False
        self._heard = self._started

    def look(self, soon: bool = False) -> None:
        """Ask again if it is time to; a queue that does not answer changes nothing."""
        now = time.monotonic()
        if not self.runs:
            self._heard = now
        if now < self._next or not self.runs:
            return
        age = now - self._started
        self._next = now + (OFTEN if soon or age < MINUTE else min(SELDOM, age / MINUTE))
        ids = {run: job_id(run) for run in self.runs}
        self._ids = {run: number for run, number in ids.items() if number is not None}
        seen = self._scheduler.look(self._ids.values())
        if seen is None:
            return
        self._asked, self._heard = True, now
        for number in self._ids.values():
            if number not in self._since or self._state(seen, number) != self._state(self._seen, number):
                self._since[number] = time.monotonic()
        self._seen = seen

    @staticmethod
    def _state(seen: dict[str, Seen], number: str) -> str | None:
        return seen[number].state if number in seen else None

    def state(self, run: Path) -> Seen | None:
        """The last line about a run's job."""
        return self._seen.get(self._ids.get(run, ""))

    def verdict(self, run: Path) -> Verdict | None:
        """How the job of `run` ended; None while it has not, or nobody can say.

        Raises:
            UserError: squeue has not answered for so long that nobody will say (5).
        """
        number, status = self._ids.get(run), read_status(run)
        silence = time.monotonic() - self._heard
        if silence > DEAF and (status or {}).get("state") in TERMINAL:
            return merge(None, status, has_saved(run), silence)
        if silence > GIVE_UP:
            left = LEFT.format(number or "without an id")
            raise UserError(f"squeue has not answered for {silence:.0f} s: {left}", code=5)
        if not self._asked or number is None or number not in self._since:
            return None
        seen, waited = self.state(run), time.monotonic() - self._since[number]
        is_silent = seen is not None and not seen.is_alive and waited >= SILENT
        code = self._scheduler.code(number) if is_silent else 1
        return merge(seen, status, has_saved(run), waited, code)


def has_saved(run: Path) -> bool:
    """Whether the ranks stopped on request and saved."""
    return (run / "control" / "requeue").exists()


def write_verdict(run: Path, verdict: Verdict, interrupted: bool) -> Status:
    """`status.json` of a run whose job has ended, written here only where the job could not do it itself."""
    status = Status.read(run)
    assert status is not None
    if verdict.reason is not None and not (status.state in TERMINAL and not interrupted):
        code, kind = (130, "Signal") if interrupted else (verdict.code, verdict.kind)
        words = f"Ctrl-C cancelled the job: {verdict.reason}" if interrupted else verdict.reason
        fail(status, code, kind, words, signal.SIGINT if interrupted else None)
        if verdict.state == "stopped" or (interrupted and has_saved(run)):
            status.state = "stopped"
        status.last_step, status.ended = last_step(run), time.time()
        status.write(run)
    return status


class Follower:
    """Shows one run while its job waits and runs."""

    def __init__(self, launch: Launch, scheduler: Scheduler, run: Path) -> None:
        self._launch, self._scheduler, self._run = launch, scheduler, run
        self._screen = Screen(run, launch.config, launch.console)
        self._queue = Queue(scheduler, [run])
        self._said = ""
        self._cancelled: float | None = None

    @property
    def _number(self) -> str:
        return job_id(self._run) or "without an id"

    def follow(self) -> Status | None:
        """The status at the job's end; None if the job was left alone after Ctrl-C."""
        signals = self._launch.signals
        with signals.collected(), Display(self._launch.console) as display:
            while True:
                if signals.came and self._cancelled is None and not self._interrupt():
                    return None
                if len(signals.came) > 1 or self._is_overdue():
                    self._launch.console.error(self._left())
                    return None
                state = (read_status(self._run) or {}).get("state")
                self._queue.look(soon=state in TERMINAL or self._cancelled is not None)
                self._say_state()
                verdict = self._queue.verdict(self._run)
                self._screen.show(display)
                self._screen.show_error(over=verdict is not None)
                if verdict is not None:
                    return write_verdict(self._run, verdict, self._cancelled is not None)
                time.sleep(LOOK)

    def _is_overdue(self) -> bool:
        return self._cancelled is not None and time.monotonic() - self._cancelled > CANCEL_WAIT

    def _left(self) -> str:
        """What is known of a cancelled job that nobody waits for; asking may have done nothing (SPUR-7)."""
        seen = self._queue.state(self._run)
        words = "" if seen is None else f", it was {seen.state} at last"
        return f"job {self._number} was asked to end{words}; not waiting for its end"

    def _interrupt(self) -> bool:
        """Cancel the job, or say how to find it again; True if it was cancelled."""
        name = signal.Signals(self._launch.signals.came[0]).name
        if self._launch.config.launcher.on_interrupt == "detach":
            self._launch.console.line(
                f"{name}: job {self._number} goes on; the same command follows it again"
            )
            return False
        self._launch.console.line(f"{name}: cancelling job {self._number}; once more leaves at once")
        self._cancelled = time.monotonic()
        self._scheduler.cancel([self._number])
        return True

    def _say_state(self) -> None:
        seen = self._queue.state(self._run)
        if seen is None:
            return
        reason = "" if seen.reason in ("None", "") else f" ({seen.reason})"
        words = f"job        {self._number} {seen.state.lower()}{reason}"
        if words != self._said:
            self._said = words
            self._launch.console.line(words)
