"""`status.json`: how a run stands, replaced atomically by one writer at a time (RUN-6)."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from src.config import Config
from src.records import Record, read_json, read_steps, write_json

SCHEMA = 1


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
        """Replace `RUN/status.json`."""
        write_json(run / "status.json", {"schema": SCHEMA, **vars(self)})

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
