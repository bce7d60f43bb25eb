"""Jobs on meshes of one, two and four ranks: a world for each number of ranks (CKPT-2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from src.config import MeshConfig
from src.mesh_spec import parse
from tests.distributed import world

Body = Callable[..., Any]
"""(job, rank, arguments…) → what the rank returns; a function of an importable module."""


def mesh_of(spec: str) -> MeshConfig:
    """The mesh of a spec."""
    return MeshConfig(spec, **({} if spec == "single" else parse(spec)))


def visit(
    jobs: Mapping[str, MeshConfig], body: Body, *arguments: Any, timeout: float = 120
) -> list[dict[str, Any]]:
    """Do each job on as many ranks as its mesh has, one job after the other.

    Worlds of their own, since ranks that leave one process group for another time and again fail to connect.

    Returns:
        by rank, what `body` returned of each job that the rank was part of.
    """
    found: list[dict[str, Any]] = [{} for _ in range(max(mesh.world for mesh in jobs.values()))]
    for ranks in sorted({mesh.world for mesh in jobs.values()}):
        mine = [name for name, mesh in jobs.items() if mesh.world == ranks]
        results = world.run(ranks, _each, mine, body, arguments, timeout=timeout)
        for rank, of_rank in enumerate(results):
            found[rank] |= of_rank
    return found


def _each(names: Sequence[str], body: Body, arguments: Sequence[Any]) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {name: body(name, rank, *arguments) for name in names}
