"""What the launching process says, on stdout and in `RUN/launcher.log`: a timed line per phase (LOG-6)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO


class Console:
    """Prints lines above whatever is being drawn; a reader who went away ends no run."""

    def __init__(self) -> None:
        self._logs: list[Path] = []
        self._early: list[str] = []
        self.above: Callable[[str], None] | None = None
        """Prints a line above the bar while one is drawn on the terminal that stdout goes to."""

    def line(self, text: str) -> None:
        """Print and log one line, or several."""
        self._log(text)
        try:
            if self.above is not None:
                self.above(text)
            else:
                write(sys.stdout, text)
        except OSError:
            self.above = lambda text: None

    def error(self, text: str) -> None:
        """Log a refusal and print it on stderr."""
        self._log(text)
        with suppress(OSError):
            write(sys.stderr, text)

    def _log(self, text: str) -> None:
        self._early.append(text)
        for path in self._logs:
            append(path, text)

    def log_to(self, *paths: Path) -> None:
        """Write all lines so far, and those to come, to these files as well."""
        self._logs = list(paths)
        for path in paths:
            for text in self._early:
                append(path, text)

    @contextmanager
    def phase(self, name: str) -> Iterator[list[str]]:
        """Time a phase and say so at its end, with the words that the body appends to the list it gets."""
        words: list[str] = []
        started = time.monotonic()
        yield words
        self.line(phase_line(name, " ".join(words), time.monotonic() - started))


def phase_line(name: str, text: str, seconds: float) -> str:
    """`name  what happened  (1.2 s)`."""
    return f"{name:<10} {text + ' ' if text else ''}({seconds:.1f} s)"


def write(stream: TextIO, text: str) -> None:
    """Write a line at once; characters that the terminal's encoding lacks become question marks."""
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
    stream.flush()


def append(path: Path, text: str) -> None:
    """Append a line to a log; a full or missing disk does not end the run."""
    with suppress(OSError), path.open("a", encoding="utf-8") as file:
        file.write(text + "\n")


def clock(seconds: float) -> str:
    """Seconds as `0:42`, `12:05` or `3:10:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
