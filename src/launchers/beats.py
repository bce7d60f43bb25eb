"""Signs of life in `control/`: how a job's nodes see that one of them, or the batch shell, is gone (SPUR-5).

Spur ends no node when another dies, and the step of a cancelled job lives on, for only the batch shell is
killed. So each side writes a number every few seconds. Who does not change it for `launcher.watchdog` is
dead, unless its record says that it has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from src.launchers.outcome import node_records
from src.records import write_atomic
from src.runs import attempts

BEAT = 2.0
"""Seconds between signs of life."""
BATCH = "batch"
"""Who the batch shell is among the nodes' numbers."""


def sign(control: Path, who: str, count: int) -> None:
    """Write one sign of life; a file system that is away for a moment is none of ours."""
    with suppress(OSError):
        write_atomic(control / f"beat.{who}", f"{count}\n")


class Listener:
    """Who of a job has been silent for how long, by this process's own clock."""

    def __init__(self, control: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._control, self._clock = control, clock
        self._heard: dict[str, tuple[str, float]] = {}

    def silence(self) -> dict[str, float]:
        """Seconds for which each has not changed its sign; who never gave one is not among them."""
        now = self._clock()
        for path in self._control.glob("beat.*"):
            with suppress(OSError):
                text, who = path.read_text(), path.name.removeprefix("beat.")
                if self._heard.get(who, ("", 0.0))[0] != text:
                    self._heard[who] = (text, now)
        return {who: now - since for who, (_, since) in self._heard.items()}

    def silent(self, limit: float) -> list[str]:
        """Those who have been silent for `limit` seconds without a record of their end."""
        ended = {str(record["node"]) for record in node_records(self._control)}
        return sorted(who for who, seconds in self.silence().items() if seconds > limit and who not in ended)

    def is_anybody_there(self, limit: float) -> bool:
        """Whether a node's agent is alive: heard within `limit`, and without a record of its end."""
        ended = {str(record["node"]) for record in node_records(self._control)}
        nodes = {who: seconds for who, seconds in self.silence().items() if who != BATCH}
        return any(seconds <= limit and who not in ended for who, seconds in nodes.items())


def await_agents(control: Path, limit: float, most: float = float("inf")) -> None:
    """Return when every agent that ever gave a sign has ended or been silent for `limit` seconds.

    Args:
        control: `RUN/control`.
        limit: seconds of silence.
        most: seconds after which nobody is waited for any more.
    """
    listener, end = Listener(control), time.monotonic() + most
    while listener.is_anybody_there(limit) and time.monotonic() < end:
        time.sleep(BEAT / 4)


class Beating:
    """Gives signs of life from a thread while the body runs, and listens for the others."""

    def __init__(self, run: Path, who: str, limit: float) -> None:
        self._run, self._who, self._limit = run, who, limit
        self._attempt = attempts(run)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._lost: str | None = None

    def lost(self) -> str | None:
        """Why this node must end: somebody is gone, or the run was taken over; None while all is well."""
        return self._lost

    def _work(self) -> None:
        listener, count = Listener(self._run / "control"), 0
        while not self._over.wait(BEAT if count else 0):
            count += 1
            if attempts(self._run) != self._attempt:
                self._lost = "another attempt at this run has begun"
                return
            sign(self._run / "control", self._who, count)
            silent = [who for who in listener.silent(self._limit) if who != self._who]
            if silent and self._lost is None:
                names = ["the batch shell" if who == BATCH else f"node {who}" for who in silent]
                self._lost = f"{' and '.join(names)} gave no sign for {self._limit:.0f} s"

    def __enter__(self) -> Beating:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
