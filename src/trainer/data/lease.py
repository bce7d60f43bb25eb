"""One holder at a time, across processes, jobs and nodes that share a directory, also on NFS (LEASE-1 to 4).

A lease is a file made with O_EXCL; its holder rewrites a second file, the beat, from a thread. Whoever waits
judges by its own monotonic clock and never reads the clock of another host. No `flock`: it does not work on
every shared file system, and it dies with a process instead of with a machine.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Literal, Self

from src.trainer.data.owner import Owner, read_owner, text_of

BEAT_SECONDS = 5.0
"""Time between two beats of a holder."""

SILENCE_SECONDS = 30.0
"""A beat unchanged for this long means that the holder is dead: six beats, more than NFS delays one."""

POLL_SECONDS = 0.1
"""First wait of a poll; waits double up to POLL_LIMIT_SECONDS (LEASE-5)."""

POLL_LIMIT_SECONDS = 2.0
"""Longest wait of a poll."""

Verdict = Literal["free", "beating", "silent", "dead"]
"""No lease; its beat was seen to change; not known yet; its holder is gone."""


class LeaseLost(Exception):  # noqa: N818 - the name says what happened
    """The lease was stolen: stop, and leave what you were making unpublished (LEASE-4)."""


class LeaseHeld(Exception):  # noqa: N818 - as above
    """Another process holds the lease; `owner` is None if its file cannot be read."""

    def __init__(self, path: Path, owner: Owner | None) -> None:
        self.owner = owner
        super().__init__(f"{path} is held by {owner or 'an unknown process'}")


class Lease:
    """A lease that this process holds; use as a context, or call `release`."""

    def __init__(self, path: Path, owner: Owner) -> None:
        self.path = path
        self.owner = owner
        self._next_beat = path.with_name(f".tmp-beat-{owner.uuid}")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name=f"lease {path.name}", daemon=True)

    @classmethod
    def take(cls, path: Path, attempt: str = "") -> Lease | None:
        """Create the lease at `path` if there is none, else return None (LEASE-1)."""
        lease = cls(path, Owner.here(attempt))
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return None
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(asdict(lease.owner), file)
                file.flush()
                os.fsync(file.fileno())
            lease._beat(0)
        except OSError:  # a full disk must not leave a lease that nobody keeps
            for left in (path, lease._next_beat):
                left.unlink(missing_ok=True)
            raise
        lease._thread.start()
        return lease

    @property
    def is_held(self) -> bool:
        """The file still says that the lease is ours."""
        owner = read_owner(self.path)
        return owner is not None and owner.uuid == self.owner.uuid

    def check(self) -> None:
        """Raise LeaseLost if somebody stole the lease; call between pieces of work and before publishing."""
        if not self.is_held:
            raise LeaseLost(f"{self.path} was taken over by {read_owner(self.path) or 'another process'}")

    def release(self) -> None:
        """Stop the beat and remove the lease, if it is still ours."""
        self._stop.set()
        self._thread.join()
        self._next_beat.unlink(missing_ok=True)
        if _take_aside(self.path, self.owner.uuid):
            beat_path(self.path).unlink(missing_ok=True)

    def _keep_beating(self) -> None:
        counter = 0
        while not self._stop.wait(BEAT_SECONDS):
            counter += 1
            with suppress(OSError):  # a storage hiccup must not end the beat
                if not self.is_held:
                    return
                self._beat(counter)

    def _beat(self, counter: int) -> None:
        self._next_beat.write_text(f"{self.owner.uuid} {counter}\n")
        self._next_beat.replace(beat_path(self.path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class Watch:
    """What a waiter knows of somebody else's lease; ask `verdict` again and again."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.owner: Owner | None = None
        """The holder as last seen."""
        self._clock = clock
        self._seen: tuple[str | None, str | None] | None = None
        self._since = clock()

    @property
    def silence(self) -> float:
        """Seconds since lease or beat were last seen to change, by this process's clock."""
        return self._clock() - self._since

    def verdict(self) -> Verdict:
        """Look at lease and beat once (LEASE-2)."""
        now = (text_of(self.path), text_of(beat_path(self.path)))
        if now[0] is None:
            return "free"
        before, self.owner = self._seen, Owner.parse(now[0])
        if now != before:
            self._seen, self._since = now, self._clock()
        if self.owner is not None and self.owner.is_local() and not self.owner.is_running():
            return "dead"
        if self.silence >= SILENCE_SECONDS:
            return "dead"
        is_same_lease = before is not None and before[0] == now[0]
        return "beating" if is_same_lease and before != now else "silent"

    def steal(self) -> bool:
        """Remove the lease that was last judged; False if it has changed hands since (LEASE-3)."""
        return _take_aside(self.path, self.owner.uuid if self.owner else None)


def claim(path: Path, attempt: str = "") -> Lease:
    """Take the lease, from a dead holder too; raises LeaseHeld at the first sign of a living one.

    On this machine the answer is immediate; a holder on another one is watched for up to SILENCE_SECONDS.
    """
    watch = Watch(path)
    while True:
        lease = Lease.take(path, attempt)
        if lease is not None:
            return lease
        verdict = watch.verdict()
        owner = watch.owner
        if verdict == "beating" or (verdict == "silent" and owner is not None and owner.is_local()):
            raise LeaseHeld(path, owner)
        if verdict == "dead":
            watch.steal()
        elif verdict == "silent":
            time.sleep(POLL_SECONDS)


def beat_path(path: Path) -> Path:
    """The beat of the lease at `path`: `beat` beside a file named `lease`, else `<name>.beat`."""
    return path.with_name("beat" if path.name == "lease" else f"{path.name}.beat")


def _take_aside(path: Path, expected: str | None) -> bool:
    """Remove the lease of `expected`, by rename so that one of two succeeds; put any other back."""
    aside = path.with_name(f"{path.name}.stale-{uuid.uuid4().hex}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return False
    owner = read_owner(aside)
    is_expected = (owner.uuid if owner else None) == expected
    if not is_expected:
        with suppress(FileExistsError):
            os.link(aside, path)
    aside.unlink()
    return is_expected
