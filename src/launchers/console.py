"""What the launching process says, on stdout and in `RUN/launcher.log`: a timed line per phase (LOG-6)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from src.errors import UserError


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
        if self.above is None:
            say(text)
            return
        try:
            self.above(text)
        except OSError:
            self.above = lambda text: None

    def error(self, text: str) -> None:
        """Log a refusal and print it on stderr."""
        self._log(text)
        say(text, sys.stderr)

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


def say(text: str, stream: TextIO | None = None) -> None:
    """Write a line to stdout, or to `stream`; a reader who went away or a full disk ends nothing."""
    stream = stream or sys.stdout
    try:
        write(stream, text)
    except (OSError, ValueError):
        silence(stream)


def show_result(text: str) -> None:
    """Write what the command was asked for. Raises UserError (1) if it cannot be written in full."""
    try:
        write(sys.stdout, text)
    except BrokenPipeError:
        silence(sys.stdout)
    except OSError as error:
        silence(sys.stdout)
        raise UserError(f"stdout cannot be written: {error.strerror}", code=1) from error


def silence(stream: TextIO) -> None:
    """Lead a stream to nowhere: what its buffer still holds would fail Python's own exit (code 120)."""
    with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def open_missing_streams() -> None:
    """Put /dev/null where stdin, stdout or stderr is closed, lest a file of the run take its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - lives as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


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
