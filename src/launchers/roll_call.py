"""Who came and who did not, where the agents of a job wait for each other in vain (RANK-1)."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from src.errors import UserError
from src.records import read_json, write_json


@contextmanager
def naming_the_absent(run: Path, node: int, nodes: int, limit: str) -> Iterator[None]:
    """Say that this node is here, and turn a rendezvous that timed out into an error with the nodes' names.

    Args:
        run: the run's directory, which all nodes see.
        node: this one's number.
        nodes: how many there are.
        limit: `launcher.timeout`, for the message.

    Raises:
        UserError: code 6, the agents did not meet.
    """
    if nodes == 1:
        yield
        return
    write_json(record(run, node), {"host": socket.gethostname()})
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__ not in ("DistStoreError", "DistNetworkError"):
            raise
        raise UserError(f"{told(run, nodes, limit)}: {error}", code=6) from error


def told(run: Path, nodes: int, limit: str) -> str:
    """Which nodes are here and which are not, by what their agents left."""
    found = {node: read_json(record(run, node)) for node in range(nodes)}
    here = [f"{node} ({said['host']})" for node, said in found.items() if said]
    absent = [str(node) for node, said in found.items() if not said]
    who = f"nodes {', '.join(absent)} did not come" if absent else "the nodes did not reach each other"
    return f"{who} within launcher.timeout={limit}; here are {', '.join(here)}"


def record(run: Path, node: int) -> Path:
    """Where a node says that it is here."""
    return run / "control" / f"here.{node}.json"
