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
