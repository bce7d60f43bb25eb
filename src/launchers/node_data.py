"""Data that a job builds itself, before its ranks start (PREP-3, `data.prepare.where=job`).

The agent of node 0 builds and leaves its word in `control/`; the others wait for it. It holds a lease there
meanwhile, so that a builder which was killed is noticed and nobody waits for an hour.
"""

from __future__ import annotations

import time
from pathlib import Path

from src.config import Config
from src.durations import seconds
from src.errors import UserError
from src.records import Record, read_json, write_json
from src.trainer.data.lease import POLL_LIMIT_SECONDS, POLL_SECONDS, Lease, Watch

WORD, LEASE = "data.json", "data.lease"
"""In `control/`: how the preparation ended, and who is at it."""


def ensure_data(run: Path, config: Config, node: int) -> None:
    """Return when this node's ranks can read their data; at once unless the job is to build it.

    Raises:
        UserError: node 0 could not build it, for its reason (4), was killed at it (4), or never came (6);
            or this node has a store of its own, with other data (4).
    """
    if config.data.kind == "synthetic" or config.data.prepare.where != "job":
        return
    if node == 0:
        tell(run, config)
        return
    word = await_word(run / "control", seconds(config.launcher.timeout))
    if word["code"]:
        raise UserError(f"node 0 could not prepare the data: {word['message']}", code=int(word["code"]))
    found = build(run, config)
    if found != word["key"]:
        store = f"paths.data={config.paths.data}"
        raise UserError(f"{store} of this node gives data {found}, that of node 0 {word['key']}", code=4)


def tell(run: Path, config: Config) -> None:
    """Build under the lease and leave word of how it ended; raises what the preparation raises."""
    control = run / "control"
    lease = Lease.take(control / LEASE)
    assert lease is not None, "control/ starts empty, and there is one node 0"
    with lease:
        try:
            word: Record = {"code": 0, "key": build(run, config)}
        except Exception as error:
            code = error.code if isinstance(error, UserError) else 4
            message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            write_json(control / WORD, {"code": code, "message": message})
            raise UserError(message, code=code) from error
        write_json(control / WORD, word)


def build(run: Path, config: Config) -> str | None:
    """The key of what is in the store now."""
    from src.trainer.data.prepare import prepare

    attempt = (read_json(run / "job.json") or {}).get("data_attempt") or ""
    return prepare(config, lambda line: print(line, flush=True), attempt).key


def await_word(control: Path, patience: float) -> Record:
    """What node 0 says; `patience` is how many seconds it may take to begin."""
    watch, poll, started = Watch(control / LEASE), POLL_SECONDS, time.monotonic()
    while True:
        verdict = watch.verdict()
        word = read_json(control / WORD)
        if word is not None:
            return word
        if verdict == "dead":
            raise UserError("node 0 was lost while it prepared the data; the same command goes on", code=4)
        if verdict == "free" and time.monotonic() - started > patience:
            raise UserError(f"node 0 began no preparation within {patience:.0f} s", code=6)
        time.sleep(poll)
        poll = min(2 * poll, POLL_LIMIT_SECONDS)
