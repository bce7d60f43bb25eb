"""How far a run is, read from its `metrics.jsonl`: a bar on a terminal, plain lines elsewhere (BAR-1)."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from src.launchers.console import Console, clock
from src.records import LineReader, Record, number, parse

if TYPE_CHECKING:
    from rich.live import Live

WINDOW = 20
"""Steps over which speed is averaged."""
REDRAW = 0.25
"""Seconds between redraws."""
WIDE = 72
"""Columns from which the numbers carry their names."""


class Progress:
    """The newest numbers of a run that is being trained."""

    def __init__(self, path: Path, total: int, resumed: bool = False) -> None:
        self.total = total
        self.last: Record = {}
        self._reader = LineReader(path, from_end=resumed)
        self._times: deque[float] = deque(maxlen=WINDOW)
        self._speeds: deque[float] = deque(maxlen=WINDOW)

    def read(self) -> Iterator[Record]:
        """Take in the steps that were written since the last call, one at a time."""
        for record in parse(self._reader.new_lines()):
            self.last = record
            for values, key in ((self._times, "step_time"), (self._speeds, "tokens_per_s")):
                value = number(record.get(key))
                if value is not None:
                    values.append(value)
            yield record

    @property
    def step(self) -> int:
        """Finished steps; 0 before the first."""
        return int(self.last.get("step", 0))

    @property
    def speed(self) -> float | None:
        """Tokens per second over the last steps."""
        return sum(self._speeds) / len(self._speeds) if self._speeds else None

    @property
    def left(self) -> float | None:
        """Seconds to the last step at the speed of the last ones."""
        if not self._times:
            return None
        return (self.total - self.step) * sum(self._times) / len(self._times)

    def words(self, wide: bool) -> str:
        """Loss, learning rate, tokens per second and time left; with their names where there is room."""
        loss, rate, left = number(self.last.get("loss")), number(self.last.get("lr")), self.left
        eta = "-:--" if left is None else clock(left)
        if wide:
            speed = "-" if self.speed is None else f"{self.speed:,.0f}"
            return f"loss {show(loss, '.3f')}  lr {show(rate, '.2e')}  {speed} tokens/s  ETA {eta}"
        speed = "-" if self.speed is None else f"{self.speed / 1000:.1f}k"
        return f"{show(loss, '.2f')} {show(rate, '.0e')} {speed}/s {eta}"

    def plain(self) -> str:
        """The line for a log file."""
        return f"step {self.step}/{self.total}  {self.words(wide=True)}"

    def bar(self, width: int, name: str = "") -> str:
        """One line of at most `width` columns."""
        head = f"{name}  " if name else ""
        if not self.last:
            return f"{head}0/{self.total} starting"[:width]
        tail = f" {self.step}/{self.total} {self.words(wide=width >= WIDE + len(head))}"
        room = max(0, min(40, width - len(head) - len(tail)))
        full = room * self.step // max(1, self.total)
        return (head + "━" * full + "─" * (room - full) + tail)[:width]


def show(value: float | None, form: str) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else format(value, form)


def has_terminal() -> bool:
    """Whether stderr is a terminal that a bar can be drawn on."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Display:
    """Draws a few lines at the bottom of the terminal on stderr, and lets the console print above them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._drawn = 0.0

    @property
    def is_drawn(self) -> bool:
        """Whether there is a terminal to draw on."""
        return self._live is not None

    @property
    def width(self) -> int:
        """Columns that a line may take; the last one stays free, where some terminals wrap."""
        return self._live.console.width - 1 if self._live else 80

    def __enter__(self) -> Display:
        if has_terminal():
            from rich.console import Console as Terminal
            from rich.live import Live

            self._live = Live(
                console=Terminal(stderr=True),
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
            if sys.stdout.isatty():
                self._console.above = self._print
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._console.above = None

    def draw(self, lines: list[str]) -> None:
        """Show these lines, at most four times a second."""
        now = time.monotonic()
        if self._live is not None and now - self._drawn >= REDRAW:
            from rich.text import Text

            self._drawn = now
            text = Text("\n".join(lines), no_wrap=True, overflow="crop")
            self._live.update(text, refresh=True)

    def _print(self, text: str) -> None:
        assert self._live is not None
        self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
