"""How long a rank waits for another in a collective, and who was waited for in vain (ENG-29).

In the first step ranks compile, allocate and read files at speeds of their own; after it a peer that is
minutes late is a peer that hangs. A peer that died is noticed at once, by the connection or by the agent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d

from src.errors import UserError

if TYPE_CHECKING:
    from src.trainer.runtime import Runtime

FIRST = timedelta(minutes=30)
"""What ranks wait for each other until the first step is done, if the steady time-out is not longer."""
ROLL_CALL = 5.0
"""Seconds that ranks which wait have to say so, once one of them gave up."""
GAVE_UP = "Timed out waiting"
"""What gloo's error begins with, 2.11 to 2.13; NCCL has its own watchdog, which ends the process."""


def wait_at_most(runtime: Runtime, limit: timedelta) -> None:
    """Set the time-out of every group of this rank, for collectives that are issued from now on.

    Gloo takes it for collectives only: its sends and receives keep the one that their group was made with.
    """
    if runtime.world > 1:
        for group in {dist.group.WORLD, *runtime.groups.values()}:
            distributed_c10d._set_pg_timeout(limit, group)


@contextmanager
def naming_the_absent(runtime: Runtime, limit: str) -> Iterator[None]:
    """Turn a collective's time-out into an error that names the ranks which do not wait in one.

    Args:
        runtime: this rank's place.
        limit: `launcher.collective_timeout`, for the message.

    Raises:
        UserError: code 6, a collective timed out.
    """
    try:
        yield
    except RuntimeError as error:
        if GAVE_UP not in str(error):
            raise
        raise UserError(_told(absent(runtime), limit), code=6) from error


def absent(runtime: Runtime) -> list[int]:
    """Ranks that have not given up waiting within `ROLL_CALL`: what hangs answers nothing."""
    store = runtime.store
    if store is None:
        return []
    missing, deadline = set(range(runtime.world)), time.monotonic() + ROLL_CALL
    try:
        store.set(f"gave up/{runtime.rank}", "")
        while missing and time.monotonic() < deadline:
            missing = {rank for rank in missing if not store.check([f"gave up/{rank}"])}
            time.sleep(0.05)
    except dist.DistError:  # Who held the store has left, having given up as well.
        return []
    return sorted(missing)


def _told(ranks: list[int], limit: str) -> str:
    if not ranks:
        return "all ranks wait for one another in different collectives; their logs say where each stands"
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return (
        f"{who} did not come to a collective and gave no sign of life: hung, or slower than "
        f"launcher.collective_timeout={limit} allows; the rank's log says what it did last"
    )
