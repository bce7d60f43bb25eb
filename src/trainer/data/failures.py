"""Builds that failed, by what they were for: all that wait for one attempt end with its reason (LEASE-6).

An attempt is a submission of a sweep. A record of another one neither fails nor satisfies anybody (LEASE-7).
"""

from __future__ import annotations

import hashlib
import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from src.errors import UserError
from src.records import read_json, write_json

TAIL = 2000
"""Letters of a traceback that are kept."""


def record_path(lease: Path, attempt: str) -> Path:
    """Where the failure of an attempt is noted, beside the lease."""
    name = hashlib.sha256(attempt.encode()).hexdigest()[:16]
    return lease.parent / "attempts" / f"{name}.json"


def check(lease: Path, attempt: str) -> None:
    """Raise UserError (4) with the reason if a build for this attempt failed; no attempt, no record."""
    record = read_json(record_path(lease, attempt)) if attempt else None
    if record is not None:
        raise UserError(f"{record['message']} (as {record['host']} found for {attempt})", code=4)


@contextmanager
def recorded(lease: Path, attempt: str) -> Iterator[None]:
    """Note what the body raises, while the lease is still held; if the disk is full, nobody learns it."""
    try:
        yield
    except Exception as error:
        if attempt and not record_path(lease, attempt).exists():
            message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            record = {"state": "failed", "attempt": attempt, "host": socket.gethostname()}
            record |= {"type": type(error).__name__, "message": message}
            record["traceback"] = traceback.format_exc()[-TAIL:]
            with suppress(OSError):
                record_path(lease, attempt).parent.mkdir(exist_ok=True)
                write_json(record_path(lease, attempt), record)
        raise
