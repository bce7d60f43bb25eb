"""What each rank of a plan holds. Ranks that must hold the same are counted once, for there may be 80,000."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from src.config import Config
from src.launchers.memory import Estimate, RankMemory, layers_of
from src.models.names import is_expert_stack, parameters
from src.trainer.parallel import layout

MOST_RANKS = 1024
"""Ranks that a plan lists one by one; of a larger world it lists the first of each kind."""

Kind = tuple[int, int, int]
"""Pipeline rank, and between which edges the shards of dense parameters and of experts lie."""


@dataclass(frozen=True)
class RankPlan:
    """One rank: where it stands and what it holds."""

    rank: int
    coordinates: dict[str, int]
    layers: list[int]
    """Global indices of its decoder layers."""
    memory: RankMemory
    count: int = 1
    """Ranks that this one stands for: itself, and in a world of more than 1,024 all that hold the same."""


def rank_plans(config: Config, platform: str) -> list[RankPlan]:
    """Every rank of the mesh in order, or the first of each kind where there are too many to read."""
    kinds = list(rank_kinds(config))
    count = Counter(kinds)
    first = {kind: kinds.index(kind) for kind in count}
    estimate = Estimate(config, platform)
    held = {kind: estimate.of(rank) for kind, rank in first.items()}
    if len(kinds) <= MOST_RANKS:
        return [_plan(config, rank, held[kind], 1) for rank, kind in enumerate(kinds)]
    alike: dict[tuple[int, RankMemory], list[Kind]] = {}
    for kind in count:
        alike.setdefault((kind[0], held[kind]), []).append(kind)
    return [
        _plan(config, first[same[0]], memory, sum(count[kind] for kind in same))
        for (_, memory), same in alike.items()
    ]


def _plan(config: Config, rank: int, memory: RankMemory, count: int) -> RankPlan:
    place = layout.coordinates(config.mesh, rank)
    axes = {axis: getattr(place, axis) for axis in layout.AXES}
    return RankPlan(rank, axes, layers_of(config, place.pp), memory, count)


def rank_kinds(config: Config) -> Iterator[Kind]:
    """The kind of each rank in order: those of one kind hold shards of the same sizes, of the same layers."""
    mesh = config.mesh
    stage, experts = mesh.world // mesh.pp, mesh.dp * mesh.cp
    dense_edges, expert_edges = _edges(config, False), _edges(config, True)
    for rank in range(mesh.world):
        shard = rank // mesh.tp % (experts * mesh.ep)
        yield rank // stage, bisect_right(dense_edges, shard), bisect_right(expert_edges, shard // mesh.ep)


def _edges(config: Config, of_experts: bool) -> list[int]:
    """Where the size of a shard changes: rows are dealt out by ceiling, so one shard is short and later ones
    are empty."""
    mesh = config.mesh
    shards = mesh.dp * mesh.cp * (1 if of_experts else mesh.ep)
    shapes = parameters(config.model).items()
    rows = {shape[0] for name, shape in shapes if is_expert_stack(name) == of_experts}
    sizes = {size // mesh.ep if of_experts else size for size in rows}
    full = {size // -(-size // shards) for size in sizes}
    return sorted(full | {shard + 1 for shard in full})
