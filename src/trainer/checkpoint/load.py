"""Load a checkpoint into a run on any mesh, or refuse with everything that differs (CKPT-2, CKPT-9)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from src.config import Config
from src.errors import Problem, UserError
from src.trainer.checkpoint.compare import config_problems, tensor_problems
from src.trainer.checkpoint.contents import Backend, collect, extra_state
from src.trainer.checkpoint.directory import Found
from src.trainer.checkpoint.shards import read
from src.trainer.runtime import Runtime


def load(
    found: Found,
    config: Config,
    backend: Backend,
    moments: Mapping[str, Mapping[str, Tensor]],
    runtime: Runtime,
    data_key: str | None,
) -> dict[str, Any]:
    """Fill parameters, moments and extra state of all ranks from `found`, in place; a collective.

    Args:
        moments: moment name → parameter name → this rank's shard; the tensors must exist (CKPT-3).

    Returns:
        The scalars given to `save`.

    Raises:
        UserError: code 8 with every difference between checkpoint and run; nothing is changed then (CKPT-9).
    """
    tensors = collect(backend, moments)
    problems = config_problems(found.meta, config, data_key)
    problems += tensor_problems(found.meta, tensors, sorted(moments), runtime)
    if problems:
        raise UserError([Problem("resume", f"{found.path} is not of this run"), *problems], code=8)
    saved = {name: shards for name, shards in tensors.items() if name in found.meta.tensors}
    read(found.path, saved, runtime)
    backend.load_extra_state(extra_state(tensors))
    return found.meta.scalars
