"""A real rank that breaks: `BREAK=1:forward@3` lets rank 1 fail in the forward of step 3 (ENG-29).

Places are forward, backward, loader, save (the one of the end, whatever the step), kill and hang.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from src.models.causal_lm import CausalLM
from src.trainer import step
from src.trainer.checkpoint import shards
from src.trainer.data.loader import Loader
from src.trainer.worker import main

steps = 0
"""Steps begun by this rank."""


def before(owner: Any, name: str, check: Callable[..., bool]) -> None:
    """Call `check` before `owner.name`, and break if it says so."""
    original = getattr(owner, name)

    def call(*arguments: Any, **keywords: Any) -> Any:
        if check(*arguments):
            break_down()
        return original(*arguments, **keywords)

    setattr(owner, name, call)


def break_down() -> None:
    if PLACE == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while PLACE == "hang":
        time.sleep(60)
    raise ValueError(f"broken in {PLACE}")


def count(*_: Any) -> bool:
    global steps
    steps += 1
    return False


if __name__ == "__main__":
    RANK, _, PLACE = os.environ["BREAK"].partition(":")
    PLACE, _, AT = PLACE.partition("@")
    if os.environ["RANK"] == RANK:
        before(step, "count_world", count)
        here = lambda *_: steps == int(AT)  # noqa: E731
        if PLACE in ("forward", "kill", "hang"):
            before(CausalLM, "loss", lambda *_: here() and torch.is_grad_enabled())
        elif PLACE == "backward":
            before(torch.autograd, "backward", here)
        elif PLACE == "loader":
            before(Loader, "read", lambda loader, number: number + 1 == int(AT))
        else:
            before(shards, "save", lambda *_: True)
    main(Path(sys.argv[1]))
