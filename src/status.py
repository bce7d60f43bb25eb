"""`status.json`: how a run stands, replaced atomically by one writer at a time (RUN-6)."""

from __future__ import annotations

import errno
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from src.config import Config
from src.records import Record, overwrite_json, read_json, read_steps, write_json

SCHEMA = 1
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk that is full."""


@dataclass
class Status:
    """`status.json` (RUN-6): one writer at a time, replaced atomically."""

    state: str
    """`queued`, `running`, `done`, `stopped` or `failed`."""
    attempt: int
    config_digest: str
    exit_code: int | None = None
    signal: int | None = None
    """The signal that ended the first failing rank or the run."""
    first_failing_rank: int | None = None
    reason: dict[str, str] | None = None
    """`type` and `message` of the first failure."""
    last_step: int | None = None
    host: str = field(default_factory=socket.gethostname)
    started: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    ended: float | None = None

    def write(self, run: Path) -> None:
        """Replace `RUN/status.json`.

        On a full disk it is written over in place, into the block that it has: a torn file means unknown,
        which is true, while the old one would say `running` for ever.
        """
        record = {"schema": SCHEMA, **vars(self)}
        try:
            write_json(run / "status.json", record)
        except OSError as error:
            if error.errno not in FULL:
                raise
            overwrite_json(run / "status.json", record)

    @property
    def why(self) -> str | None:
        """The reason in one line."""
        return f"{self.reason['type']}: {self.reason['message']}" if self.reason else None

    @classmethod
    def read(cls, run: Path) -> Status | None:
        """What `RUN/status.json` holds, to be gone on with; None where that is unknown."""
        record = read_status(run)
        if record is None or record.pop("schema", None) != SCHEMA:
            return None
        return cls(**record)


def read_status(run: Path) -> Record | None:
    """The object in `RUN/status.json`; None means unknown, never done."""
    return read_json(run / "status.json")


def last_step(run: Path) -> int | None:
    """The last step in `RUN/metrics.jsonl`; None without one."""
    steps = read_steps(run / "metrics.jsonl")
    return int(steps[-1]["step"]) if steps else None


def is_finished(run: Path, config: Config) -> bool:
    """Whether the run is done, up to the steps asked for (RUN-2)."""
    status = read_status(run) or {}
    step = status.get("last_step")
    return status.get("state") == "done" and (step is None or int(step) >= config.max_steps)
