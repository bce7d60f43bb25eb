"""What the time-outs rely on in torch, 2.11 to 2.13, and who is named (ENG-29)."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore

from src.config import LauncherConfig, MeshConfig
from src.errors import UserError
from src.trainer.callbacks.steady import SteadyTimeouts
from src.trainer.parallel import timeouts
from src.trainer.parallel.timeouts import GAVE_UP, naming_the_absent, wait_at_most
from src.trainer.runtime import join
from tests.distributed import world

SHORT, LONG = timedelta(milliseconds=300), timedelta(minutes=1)


def given_up(call: Callable[[], object]) -> str:
    """The error of a call that nobody answers."""
    begun = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        return str(error) if time.monotonic() - begun < 3 else f"late: {error}"
    return "answered"


def nobody_comes() -> list[str]:
    """Errors of rank 0 in a collective and in a receive that rank 1 stays away from."""
    rank = dist.get_rank()
    runtime = join(MeshConfig("dp2", dp=2), rank, rank, torch.device("cpu"))
    collective, pair = dist.new_group([0, 1], LONG), dist.new_group([0, 1], SHORT)
    runtime.groups |= {("dp",): collective, ("pp",): pair}
    dist.all_reduce(torch.ones(1), group=collective)
    wait_at_most(runtime, SHORT)
    if rank == 1:
        time.sleep(1.5)
        errors = []
    else:
        errors = [
            given_up(lambda: dist.all_reduce(torch.ones(1), group=collective)),
            given_up(lambda: dist.recv(torch.ones(1), src=1, group=pair)),
        ]
    wait_at_most(runtime, LONG)
    return errors


def test_gloo_gives_up_after_the_time_out() -> None:
    """ENG-29: a collective after the one set later, a receive after the one that its group was made with."""
    errors, _ = world.run(2, nobody_comes)
    assert len(errors) == 2
    assert [error for error in errors if GAVE_UP not in error or error.startswith("late")] == []


def test_the_absent_are_named(tmp_path: Path) -> None:
    """ENG-29, EXIT: code 6 and the ranks that did not give up as well; other errors pass as they are."""
    store = FileStore(str(tmp_path / "store"), 4)
    place = mock.Mock(rank=0, world=4, store=store)
    for other in (1, 3):
        store.set(f"gave up/{other}", "")
    with (
        mock.patch.object(timeouts, "ROLL_CALL", 0.2),
        pytest.raises(UserError, match=r"^rank 2 did not come .*launcher\.collective_timeout=3m") as caught,
        naming_the_absent(place, "3m"),
    ):
        raise RuntimeError(f"[gloo/x.cc:78] {GAVE_UP} 3000ms for recv operation to complete")
    assert caught.value.code == 6
    store.set("gave up/2", "")
    with pytest.raises(UserError, match="wait for one another"), naming_the_absent(place, "3m"):
        raise RuntimeError(GAVE_UP)
    with pytest.raises(RuntimeError, match="out of memory"), naming_the_absent(place, "3m"):
        raise RuntimeError("out of memory")


def test_the_steady_time_out_is_set_once_after_all_have_made_a_step() -> None:
    """ENG-29: all ranks meet first, for one may still be compiling."""
    run, order = mock.Mock(), []
    run.config.launcher = LauncherConfig(collective_timeout="7m")
    run.runtime.barrier = lambda: order.append("barrier")
    steady = SteadyTimeouts()
    with mock.patch(
        "src.trainer.callbacks.steady.wait_at_most", lambda runtime, limit: order.append(str(limit))
    ):
        steady.step(run)
        steady.step(run)
    assert order == ["barrier", "0:07:00"]
