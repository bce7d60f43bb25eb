"""Who holds a lease: what its file says, and whether that process still runs here."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class Owner:
    """Who holds a lease, as its file says."""

    uuid: str
    host: str
    pid: int
    pid_start: str
    """Start in clock ticks since boot, empty if unknown: a reused pid is not the holder."""
    boot_id: str
    """The kernel's boot id with the pid namespace: pids compare only where both are equal."""
    attempt: str
    """What the holder works for; free text."""
    started: str
    """Wall-clock time for people; nothing is decided by it."""

    @classmethod
    def here(cls, attempt: str) -> Owner:
        """This process, under a fresh uuid."""
        pid = os.getpid()
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        return cls(uuid.uuid4().hex, socket.gethostname(), pid, _pid_start(pid), _boot_id(), attempt, started)

    @classmethod
    def parse(cls, text: str | None) -> Self | None:
        """The owner that a lease's text names; None for no lease, one not written yet, or not by us."""
        try:
            found = json.loads(text or "")
            return cls(**{field.name: found[field.name] for field in fields(cls)})
        except (ValueError, KeyError, TypeError):
            return None

    def is_local(self) -> bool:
        """The holder runs under this kernel and pid namespace, so that its pid can be looked up."""
        return self.pid_start != "" and (self.host, self.boot_id) == (socket.gethostname(), _boot_id())

    def is_running(self) -> bool:
        """The holder's process exists; ask only if `is_local`."""
        return _pid_start(self.pid) == self.pid_start

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.started}"


def read_owner(path: Path) -> Owner | None:
    """Who holds the lease at `path`; None if nobody does or its file is not whole yet."""
    return Owner.parse(text_of(path))


def text_of(path: Path) -> str | None:
    """The text of a small file that others replace; None if it is not there."""
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return None


def _boot_id() -> str:
    boot = text_of(Path("/proc/sys/kernel/random/boot_id")) or ""
    with suppress(OSError):
        return f"{boot.strip()}/{os.readlink('/proc/self/ns/pid')}"
    return boot.strip()


def _pid_start(pid: int) -> str:
    """Start time of a process, empty if it does not exist or is a zombie."""
    stat = text_of(Path(f"/proc/{pid}/stat"))
    if stat is None:
        return ""
    state, *rest = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else rest[18]
