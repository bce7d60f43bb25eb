"""Watching ranks: progress, console, stop requests, the first failure (RANK-2, LOCAL-2, AGENT-3)."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from src.config import Config
from src.durations import seconds
from src.launchers.bar import Display, Progress
from src.launchers.console import Console
from src.launchers.outcome import error_records, first_record, has_failed
from src.launchers.ranks import Ranks, send
from src.records import LineReader
from src.status import read_status

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LOOK = 0.1
"""Seconds between looks at the ranks and their files."""
SETTLE = 1.0
"""Seconds after the first error record in which an earlier cause may still be written."""
ALONE = 10.0
"""Seconds that the other ranks have to end by themselves after the first error (ELA-4)."""


class Interrupted(BaseException):
    """A stop signal came while no rank was running."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


class Signals:
    """Stop signals of the launching process: raised as `Interrupted`, or collected while ranks run."""

    def __init__(self, scheduled: bool = False) -> None:
        """`scheduled`: a scheduler sends them, several times over, and kills by itself (AGENT-3)."""
        self.came: list[int] = []
        self._collect, self.scheduled = False, scheduled

    @property
    def insist(self) -> bool:
        """Whether somebody who asked before wants the ranks killed now."""
        return len(self.came) > 1 and not self.scheduled

    @contextmanager
    def installed(self) -> Iterator[Signals]:
        """Handle the signals in the main thread; the old handlers come back on the way out."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """While the body runs, signals are appended to `came` and raise nothing."""
        before, self._collect = self._collect, True
        try:
            yield
        finally:
            self._collect = before

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.came.append(number)
        if not self._collect:
            raise Interrupted(number)


@dataclass(frozen=True)
class Ended:
    """How the ranks ended."""

    codes: dict[int, int]
    """Return codes in the order in which the ends were noticed."""
    signal: int | None
    """The first stop signal that came to this process."""
    killed: bool
    """Whether ranks had to be killed."""


class Screen:
    """Shows a run on the terminal: rank 0's log, the steps, and why a rank failed."""

    def __init__(self, run: Path, config: Config, console: Console) -> None:
        self._run, self._config, self._console = run, config, console
        self._progress = Progress(run / "metrics.jsonl", config.max_steps, resumed=True)
        self._log = LineReader(run / "ranks" / "rank_00000.log", from_end=True)
        self._failed: float | None = None
        self._shown = False

    def show(self, display: Display) -> None:
        """Print what is new and draw the bar."""
        for line in self._log.new_lines():
            self._console.line(line)
        for record in self._progress.read():
            if not display.is_drawn and self._is_due(int(record["step"])):
                self._console.line(self._progress.plain())
        display.draw([self._progress.bar(display.width)])

    def _is_due(self, step: int) -> bool:
        return step in (1, self._config.max_steps) or step % self._config.logger.every == 0

    def show_error(self, over: bool) -> None:
        """Print the first failing rank's traceback once, when no earlier cause can come any more (RANK-2)."""
        records = [] if self._shown else error_records(self._run / "control")
        if not records:
            return
        now = time.monotonic()
        self._failed = self._failed or now
        if over or now - self._failed > SETTLE:
            self._shown = True
            record = first_record(records)
            if record is not None and int(record["rank"]) != 0:
                self._console.line(f"rank {record['rank']} failed:\n{record['traceback'].rstrip()}")


def time_left(run: Path, config: Config) -> float:
    """Seconds until the attempt has to begin to save, by `launcher.time` and our own clock (AGENT-2).

    Slurm's limit is in whole minutes; a scheduler's warning may be missed, or not be given.
    """
    if config.launcher.time is None:
        return float("inf")
    limit = seconds(config.launcher.time)
    if config.launcher.name == "slurm":
        limit = 60 * -(-limit // 60)
    started = float((read_status(run) or {}).get("started") or time.time())
    return limit - seconds(config.launcher.grace) - max(0.0, time.time() - started)


class Watcher:
    """Starts the ranks of one run, or of one of its nodes, and looks at them until all have ended."""

    def __init__(
        self,
        run: Path,
        config: Config,
        console: Console,
        signals: Signals,
        screen: Screen | None = None,
        slack: float = 0.0,
        lost: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Watch the ranks of `run`, once they are started.

        Args:
            run: the run's directory.
            config: the run's.
            console: says what is done to the ranks.
            signals: stop requests.
            screen: shows steps, where somebody looks.
            slack: seconds on top for ranks behind an agent that watches them by the same rules.
            lost: says why the ranks must end at once, None while they may go on.
        """
        self._run, self._config, self._slack = run, config, slack
        self._console, self._signals, self._screen = console, signals, screen
        self._deadline, self._lost = time.monotonic() + time_left(run, config), lost
        self._asked: float | None = None
        self._failed: float | None = None
        self._killed = False

    def watch(self, start: Callable[[], Ranks]) -> Ended:
        """Return when all ranks have ended; a signal asks them to save, a second or too long a wait kills."""
        with self._signals.collected(), Display(self._console) as display:
            ranks = start()
            while True:
                codes = ranks.codes()
                if self._screen is not None:
                    self._screen.show(display)
                    self._screen.show_error(over=codes is not None)
                self._look_for_stop(ranks)
                if codes is not None:
                    ranks.close()
                    came = self._signals.came
                    return Ended(codes, came[0] if came else None, self._killed)
                self._look_for_errors(ranks)
                time.sleep(LOOK)

    def _look_for_stop(self, ranks: Ranks) -> None:
        came = self._signals.came
        now = time.monotonic()
        if self._asked is None and (came or now > self._deadline):
            self._asked = now
            why = signal.Signals(came[0]).name if came else f"launcher.time={self._config.launcher.time}"
            (self._run / "control" / "stop").write_text(f"{why}\n")
            once_more = "" if self._signals.scheduled else "; once more kills"
            self._console.line(f"{why}: saving, then stopping{once_more}")
        grace = seconds(self._config.launcher.grace) + self._slack
        overdue = self._asked is not None and now - self._asked > grace
        if self._signals.insist or overdue:
            over = f"launcher.grace={self._config.launcher.grace} is over"
            self._kill(ranks, "a second signal" if self._signals.insist else over)

    def _look_for_errors(self, ranks: Ranks) -> None:
        reason = self._lost()
        if reason is not None:
            self._kill(ranks, reason)
        if not has_failed(self._run / "control"):
            return
        now = time.monotonic()
        self._failed = self._failed or now
        if now - self._failed > ALONE + self._slack:
            self._kill(ranks, f"still there {ALONE:.0f} s after the first error")

    def _kill(self, ranks: Ranks, reason: str) -> None:
        if not self._killed:
            self._console.line(f"killing the ranks: {reason}")
        self._killed = True
        send(ranks.pids(), signal.SIGKILL)
