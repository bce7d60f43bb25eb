"""How a rank joins the others."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from src.config import LauncherConfig, MeshConfig
from src.errors import UserError
from src.trainer.runtime import start
from src.trainer.same_run import check_same
from tests.trainer.small import small_config


def test_a_rank_that_stays_away_is_waited_for_as_long_as_the_config_says(tmp_path: Path) -> None:
    """EXIT: `launcher.timeout` bounds the start; code 6, and the message names the rank."""
    away = small_config(tmp_path, mesh=MeshConfig(spec="dp2", dp=2), launcher=LauncherConfig(timeout="1s"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    numbers = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with (
        mock.patch.dict(os.environ, numbers),
        pytest.raises(UserError, match=r"the others, launcher\.timeout=1s") as late,
    ):
        start(away)
    assert late.value.code == 6
    assert not dist.is_initialized()


def test_ranks_of_another_run_and_a_rank_that_comes_twice_are_named() -> None:
    """RANK-1: exit 6 before any collective, with both configs, or the rank."""
    store = dist.HashStore()
    check_same(store, 0, "a" * 64)
    check_same(store, 1, "a" * 64)
    with pytest.raises(
        UserError, match=r"rank 2 has the config bbbbbbbbbbbb, rank 0 aaaaaaaaaaaa"
    ) as refused:
        check_same(store, 2, "b" * 64)
    assert refused.value.code == 6
    with pytest.raises(UserError, match="rank 1 came twice") as refused:
        check_same(store, 1, "a" * 64)
    assert refused.value.code == 6
