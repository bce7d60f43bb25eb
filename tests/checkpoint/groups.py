"""One world of four ranks that is cut into groups of one, two or four, a mesh to each (CKPT-2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from src.config import MeshConfig
from src.mesh_spec import parse

Result = TypeVar("Result")
WORLD = 4


def mesh_of(spec: str) -> MeshConfig:
    """The mesh of a spec."""
    return MeshConfig(spec, **({} if spec == "single" else parse(spec)))


def visit(store: Path, jobs: Mapping[str, MeshConfig], work: Callable[[str, int], Result]) -> dict[str, Any]:
    """Do each job on ranks of its own, as many as its mesh has, side by side where they fit.

    Args:
        store: a name for files by which groups meet.
        jobs: name → mesh.
        work: gets the job's name and this process's rank in its mesh.

    Returns:
        what `work` returned on this rank, by job.
    """
    results = {}
    for ranks in (1, 2, 4):
        mine = [name for name, mesh in jobs.items() if mesh.world == ranks]
        with group_of(ranks, store) as (group, rank):
            for name in mine[group :: WORLD // ranks]:
                results[name] = work(name, rank)
    return results


@contextmanager
def group_of(ranks: int, store: Path) -> Iterator[tuple[int, int]]:
    """Leave the world's process group for groups of `ranks` neighbours; gives group and rank in it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    place = divmod(rank, ranks)
    try:
        if ranks > 1:
            _join(place[1], ranks, Path(f"{store}.{ranks}.{place[0]}"))
        yield place
        if ranks > 1:
            dist.destroy_process_group()
    finally:
        _join(rank, world, Path(f"{store}.{ranks}.back"))


def _join(rank: int, world: int, store: Path) -> None:
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{store}", timeout=timeout, rank=rank, world_size=world)
