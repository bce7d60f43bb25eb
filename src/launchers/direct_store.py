"""The store through which processes that were started together learn what rank 0 decided (DIRECT-1).

No file system need be shared: the config goes one way through it, the agents' records the other way.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from src.launchers.outcome import node_records
from src.launchers.places import Place
from src.launchers.watch import LOOK

WAIT = timedelta(hours=1)
"""How long ranks wait for rank 0, which may be preparing data."""
RECORDS = 10.0
"""Seconds that the first node waits for the records of the others."""


def publish(place: Place, message: dict[str, Any]) -> object:
    """Tell the other ranks; the store must be kept while they may still read."""
    store = open_store(place)
    store.set(key(), json.dumps(message))
    if "code" in message:
        for rank in range(1, place.tasks):
            with suppress(Exception):
                store.wait([f"{key()}/{rank}"], timedelta(seconds=RECORDS))
    return store


def key() -> str:
    """Key of the message; each start by torchrun has its own."""
    return f"manyhead/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/launch"


def open_store(place: Place, wait: timedelta = WAIT) -> Any:
    """The store at which the ranks meet; rank 0 serves it where torchrun's agent does not."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    serves = place.rank == 0 and not place.has_store
    return TCPStore(place.address, place.port, None, serves, wait, wait_for_workers=False, multi_tenant=True)


def await_records(run: Path, nodes: int, store: Any) -> None:
    """Wait a little for the records of the other nodes' agents; fetch those that lie on another disk."""
    end = time.monotonic() + RECORDS
    while len(node_records(run / "control")) < nodes and time.monotonic() < end:
        for number in range(1, nodes):
            if store.check([f"{key()}/records/{number}"]):
                for name, text in json.loads(store.get(f"{key()}/records/{number}")).items():
                    if not (run / "control" / name).exists():
                        (run / "control" / name).write_text(text)
        time.sleep(LOOK)


def send_records(run: Path, place: Place) -> None:
    """Tell the first node how this one's ranks ended; it may be gone, or have read it from a shared disk."""
    files = [*(run / "control").glob("error.*.json"), run / "control" / f"node.{place.rank}.json"]
    text = json.dumps({file.name: file.read_text() for file in files if file.is_file()})
    with suppress(Exception):
        open_store(place, timedelta(seconds=RECORDS)).set(f"{key()}/records/{place.rank}", text)
