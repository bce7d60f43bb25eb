"""Arithmetic of the mesh: which rank is where, which layers and experts it holds (ENG-1, ENG-2, ENG-14).

No torch here: plans are made before anything is started.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from src.config import Config, MeshConfig
from src.errors import Problem, UserError

AXES = ("pp", "rep", "dp", "cp", "ep", "tp")
"""Mesh axes, outer to inner; ranks are row-major over them."""


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands on the mesh."""

    pp: int
    rep: int
    dp: int
    cp: int
    ep: int
    tp: int
    data: int
    """Index over (rep, dp, ep), row-major: ranks that agree in it read the same samples (ORDER-3)."""


def coordinates(mesh: MeshConfig, rank: int) -> Coordinates:
    """Coordinates of a rank; row-major over `AXES`."""
    assert 0 <= rank < mesh.world, (rank, mesh.world)
    place: dict[str, int] = {}
    rest = rank
    for axis in reversed(AXES):
        rest, place[axis] = divmod(rest, sizes(mesh)[axis])
    data = (place["rep"] * mesh.dp + place["dp"]) * mesh.ep + place["ep"]
    return Coordinates(**place, data=data)


def sizes(mesh: MeshConfig) -> dict[str, int]:
    """Axis → size, in design order."""
    return {"pp": mesh.pp, "rep": mesh.rep, "dp": mesh.dp, "cp": mesh.cp, "ep": mesh.ep, "tp": mesh.tp}


def spec(mesh: MeshConfig) -> str:
    """Canonical name: the axes above one in design order, or `single` (CFG-8)."""
    return "".join(f"{axis}{size}" for axis, size in sizes(mesh).items() if size > 1) or "single"


def is_sharded(mesh: MeshConfig) -> bool:
    """Whether parameters are shared out or replicated; otherwise a stage keeps plain modules."""
    return mesh.rep * mesh.dp * mesh.cp * mesh.ep > 1


def micro_batches(config: Config) -> int:
    """N, the micro-batches of a data rank in one step: G / (b · rep · dp · ep)."""
    return config.global_batch_size // (config.micro_batch_size * config.mesh.data_ranks)


def stages_per_rank(config: Config) -> int:
    """v, the stages of each rank; one where there is no pipeline, whatever the schedule asks for."""
    return config.pipeline.stages_per_rank if config.mesh.pp > 1 else 1


def stage_count(config: Config) -> int:
    """Pipeline stages: ranks times stages per rank."""
    return config.mesh.pp * stages_per_rank(config)


IN_V = ("zbv", "dualpipev")
"""Schedules under which a rank holds a stage on the way down and its mirror image on the way up."""


def rank_of(config: Config, stage: int) -> int:
    """Pipeline rank that holds a stage (ENG-14).

    In a V, ranks come in order on the way down and backwards on the way up, so that the first holds both
    ends; else they come in order again and again.
    """
    ranks = config.mesh.pp
    lap, rank = divmod(stage, ranks)
    return ranks - 1 - rank if lap % 2 and config.pipeline.schedule in IN_V else rank


def stages_of(config: Config, rank: int) -> tuple[int, ...]:
    """Stages of a pipeline rank, in the order in which a micro-batch passes them."""
    return tuple(stage for stage in range(stage_count(config)) if rank_of(config, stage) == rank)


def last_rank(config: Config) -> int:
    """Pipeline rank that holds the last stage, and with it the loss: the first one in a V."""
    return rank_of(config, stage_count(config) - 1)


DEFERRING = ("zbv", "dualpipev")
"""Schedules that compute weight gradients apart from those of activations."""


def defers(config: Config) -> bool:
    """Whether weight gradients wait for their turn (ENG-15)."""
    return is_staged(config) and config.mesh.pp > 1 and config.pipeline.schedule in DEFERRING


def is_staged(config: Config) -> bool:
    """Whether the stages of layers run apart (`pipeline.program`)."""
    if config.pipeline.program == "auto":
        return config.mesh.pp > 1 or config.recompute.name != "none"
    return config.pipeline.program == "staged"


def split_layers(layers: int, stages: int) -> list[range]:
    """Layers of each stage: contiguous, sizes differ by at most 1, the larger ones inside first (ENG-14).

    The edges carry embedding and head, so they are the last to get a layer more: 27 on 8 stages is
    3 4 4 4 3 3 3 3.
    """
    assert 1 <= stages <= layers, (layers, stages)
    small, extra = divmod(layers, stages)
    first = 1 if extra < stages - 1 else 0
    size = [small + (first <= stage < first + extra) for stage in range(stages)]
    starts = [sum(size[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, size, strict=True)]


def expert_block(experts: int, ep: int, rank: int) -> range:
    """Global ids of the experts that one ep rank owns: contiguous blocks of E/ep (ENG-2)."""
    share = experts // ep
    return range(rank * share, (rank + 1) * share)


def auto(config: Config, devices: int) -> MeshConfig:
    """The mesh with dp filled so that all devices are used; the other axes stay.

    Raises:
        UserError: the other axes do not divide the number of devices (never rounded down).
    """
    others = replace(config.mesh, dp=1).world
    if devices % others:
        fit = ", ".join(str(n) for n in neighbours(devices, lambda n: n % others == 0))
        message = f"{devices} devices are not a multiple of {others}, the product of the other axes"
        raise UserError([Problem("mesh", message, f"use {fit} devices, or other axes", rule="world")])
    return replace(config.mesh, dp=devices // others)


def neighbours(value: int, works: Callable[[int], bool], limit: int = 1 << 16) -> list[int]:
    """The nearest values below and above that work, in that order; those that exist."""
    below = next((n for n in range(value - 1, 0, -1) if works(n)), None)
    above = next((n for n in range(value + 1, value + limit) if works(n)), None)
    return [n for n in (below, above) if n is not None]
