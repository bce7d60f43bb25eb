"""How a run ended: the first failure among its ranks and the exit code it gives (AGENT-4, EXIT)."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from src.records import Record, read_json

FROM_A_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|gloo/transport|socket"
    r"|NCCL|remote process exited|timed out waiting|DistBackendError|DistNetworkError|DistStoreError",
    re.IGNORECASE,
)
"""What the ranks around a dead one report; such a record yields to another one within `YIELDS`."""
YIELDS = 10.0
"""Seconds."""


@dataclass(frozen=True)
class Failure:
    """The first failing rank and its reason."""

    rank: int
    code: int
    """The exit code: the rank's own, or 128 + signal."""
    type: str
    message: str
    traceback: str = ""
    signal: int | None = None


def error_records(control: Path) -> list[Record]:
    """The ranks' `error.<rank>.json`, earliest first."""
    found = [read_json(path) for path in control.glob("error.*.json")]
    return sorted((record for record in found if record), key=lambda record: float(record["time"]))


def node_records(control: Path) -> list[Record]:
    """The agents' `node.<k>.json`, earliest first."""
    found = [read_json(path) for path in control.glob("node.*.json")]
    return sorted((record for record in found if record), key=lambda record: float(record["time"]))


def has_failed(control: Path) -> bool:
    """Whether a rank, here or on another node, has failed."""
    return any(control.glob("error.*.json")) or any(record["code"] for record in node_records(control))


def codes_of_nodes(records: list[Record]) -> dict[int, int]:
    """Return codes of all ranks in the order of their nodes' ends, without deaths that an agent caused."""
    ours = (-signal.SIGTERM, -signal.SIGKILL)
    codes: dict[int, int] = {}
    for record in records:
        for rank, code in record["codes"].items():
            if not (record["killed"] and code in ours):
                codes[int(rank)] = int(code)
    return codes


def is_from_a_peer(record: Record) -> bool:
    """Whether the error is only that another rank is gone."""
    return FROM_A_PEER.search(f"{record['type']}: {record['message']}") is not None


def first_record(records: list[Record]) -> Record | None:
    """The earliest record that is a cause; if none came within `YIELDS`, the earliest of all (AGENT-4)."""
    if not records:
        return None
    near = [record for record in records if float(record["time"]) <= float(records[0]["time"]) + YIELDS]
    return next((record for record in near if not is_from_a_peer(record)), records[0])


def code_words(code: int) -> str:
    """An exit code in words; 128 + n, as shells and srun say it, is a signal (SLURM-3)."""
    number = code - 128
    if number in {int(known) for known in signal.Signals}:
        return f"code {code}, killed by signal {number} ({signal.Signals(number).name})"
    return f"code {code}"


def exit_code(code: int) -> int:
    """A process's return code as an exit code: −n is 128 + n."""
    return 128 - code if code < 0 else code


def silent_ranks(codes: dict[int, int], records: list[Record], killed: bool) -> list[int]:
    """Ranks that died without a record, but for those that the agent or this launch ended afterwards."""
    recorded = {int(record["rank"]) for record in records}
    ours = {-signal.SIGTERM, -signal.SIGKILL} if killed else {-signal.SIGTERM}
    silent = [rank for rank, code in codes.items() if code != 0 and rank not in recorded]
    return [rank for rank in silent if codes[rank] not in ours] or (silent if not records else [])


def first_failure(control: Path, codes: dict[int, int], killed: bool = False) -> Failure | None:
    """Which rank failed first; None if all ended with 0.

    A record of a cause comes before a death without a record, and that before "connection closed by peer".

    Args:
        control: `RUN/control`.
        codes: the ranks' return codes in the order in which their ends were noticed.
        killed: whether this launch killed ranks that did not end by themselves.
    """
    if not any(codes.values()):
        return None
    records = error_records(control)
    record, silent = first_record(records), silent_ranks(codes, records, killed)
    if silent and (record is None or is_from_a_peer(record)):
        return died(silent[0], codes[silent[0]])
    if record is None:
        rank = next(rank for rank, code in codes.items() if code != 0)
        return died(rank, codes[rank])
    rank = int(record["rank"])
    code = int(record["code"]) or exit_code(codes.get(rank, 1)) or 1
    return Failure(rank, code, record["type"], record["message"], record["traceback"])


def died(rank: int, code: int) -> Failure:
    """The failure of a rank that left no record."""
    if code >= 0:
        return Failure(rank, code, "ExitCode", f"rank {rank} exited with code {code} and left no record")
    name = signal.Signals(-code).name
    hint = "; the kernel kills so where memory runs out" if code == -signal.SIGKILL else ""
    return Failure(rank, 128 - code, "Signal", f"rank {rank} was ended by {name}{hint}", signal=-code)
