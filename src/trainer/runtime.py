"""What a rank knows of its place: device, coordinates, process groups, reductions over mesh axes.

Everything that is decided for all ranks goes through here, so that one rank alone needs no process group.
Only groups of two and more ranks are made, and two sets of axes that span the same ranks share one group: on
two cores a gloo group costs a rank some ten milliseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from src.config import Config, MeshConfig
from src.digest import config_digest
from src.durations import seconds
from src.errors import UserError
from src.trainer import determinism
from src.trainer.parallel.layout import AXES, Coordinates, coordinates, sizes
from src.trainer.parallel.timeouts import FIRST, wait_at_most
from src.trainer.same_run import check_same

T = TypeVar("T")

GROUPS: tuple[tuple[str, ...], ...] = (
    ("pp",),
    ("rep",),
    ("cp",),
    ("ep",),
    ("dp", "cp"),
    ("dp", "cp", "ep"),
    ("rep", "dp", "cp", "ep"),
)
"""Sets of axes that the engine communicates over, beside the whole world (ENG-2, reductions table)."""


@dataclass
class Runtime:
    """A rank's place and its means of talking to others."""

    rank: int
    world: int
    local_rank: int
    device: torch.device
    mesh: MeshConfig
    place: Coordinates
    groups: dict[tuple[str, ...], dist.ProcessGroup] = field(default_factory=dict)
    """Axes → group of the ranks that differ from this one in these only; absent where it is alone."""
    store: Store | None = None
    """Where ranks leave word for one another; None in one rank alone."""

    @property
    def data_coordinate(self) -> int:
        """Which samples this rank reads (ORDER-3)."""
        return self.place.data

    @property
    def counts_samples(self) -> bool:
        """Whether it counts its samples in sums over the world: ranks of other pp and cp read the same."""
        return self.place.pp == 0 and self.place.cp == 0

    def size(self, *axes: str) -> int:
        """Number of ranks that differ from this one in `axes` only, itself included."""
        size = 1
        for axis in axes:
            size *= sizes(self.mesh)[axis]
        return size

    def ranks(self, *axes: str) -> list[int]:
        """Global ranks of `size(*axes)`, row-major over the axes."""
        return _peers(self.mesh, self.rank, axes)

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The process group over `axes`, or None if it is this rank alone."""
        if self.size(*axes) == 1:
            return None
        if self.size(*axes) == self.world:
            return dist.group.WORLD
        return self.groups[tuple(axis for axis in AXES if axis in axes and self.size(axis) > 1)]

    def reduce(self, tensor: Tensor, axes: Iterable[str], op: str = "sum") -> Tensor:
        """Reduce in place over `axes` and return the tensor; `op` is sum, max or min."""
        group = self.group(*axes)
        if group is not None:
            dist.all_reduce(tensor, OPERATIONS[op], group=group)
        return tensor

    def sum_world(self, tensor: Tensor) -> Tensor:
        """SUM over all ranks, in place; returns the tensor."""
        return self.reduce(tensor, AXES)

    def max_world(self, value: int) -> int:
        """Largest value of all ranks; reads the device."""
        return int(self.reduce(torch.tensor(value, device=self.device), AXES, "max").item())

    def broadcast_object(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        return self.gather_objects(value)[0] if self.world > 1 else value

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's value by rank, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the process groups."""
        if dist.is_initialized():
            dist.destroy_process_group()


OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def start(config: Config) -> Runtime:
    """Join the other ranks, as RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* in the environment tell.

    Raises:
        UserError: the environment has another number of ranks than the mesh (2), there is no such device
            (3), or a rank does not come within `launcher.timeout` (6).
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if world != config.mesh.world:
        raise UserError(
            f"{world} ranks were started, the mesh has {config.mesh.world}: start that many ranks"
        )
    determinism.settle(config)
    device = pick_device(config, local_rank)
    determinism.check(config, device)
    if world == 1:
        return join(config.mesh, rank, local_rank, device)
    store, steady = meet(config, rank, world), timedelta(seconds=seconds(config.launcher.collective_timeout))
    check_same(store, rank, config_digest(config))
    backend = "nccl" if device.type == "cuda" and not config.launcher.share_device else "gloo"
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=world,
        store=PrefixStore("default_pg", store),
        timeout=steady,
        device_id=device if backend == "nccl" else None,
    )
    runtime = replace(join(config.mesh, rank, local_rank, device, steady), store=store)
    wait_at_most(runtime, max(FIRST, steady))
    return runtime


def meet(config: Config, rank: int, world: int) -> Store:
    """The store that MASTER_* names, once every rank is there; collectives wait longer than this."""
    limit = timedelta(seconds=seconds(config.launcher.timeout))
    absent = "the others"
    try:
        store: Store = next(rendezvous("env://", rank, world, timeout=limit))[0]
        store.set(f"start/{rank}", os.environ.get("MANYHEAD_SHARED", "{}"))
        for other in range(world):
            absent = f"rank {other}"
            store.wait([f"start/{other}"], limit)
        check_shared(rank, *(json.loads(store.get(f"start/{other}")) for other in (rank, 0)))
    except dist.DistError as error:
        message = f"timed out waiting for {absent}, launcher.timeout={config.launcher.timeout}"
        raise UserError(f"{message}: see their logs, or let it wait longer", code=6) from error
    return store


def check_shared(rank: int, mine: dict[str, str], first: dict[str, str]) -> None:
    """Raise `UserError` (6) where a variable that all nodes must share is not rank 0's (ENV-4)."""
    wrong = [name for name in sorted({*mine, *first}) if mine.get(name) != first.get(name)]
    if wrong:
        shown = "; ".join(f"{name} is {mine.get(name)}, on rank 0 {first.get(name)}" for name in wrong)
        raise UserError(f"rank {rank}: {shown}: export the same on every node, or set env.NAME", code=6)


def join(
    mesh: MeshConfig, rank: int, local_rank: int, device: torch.device, timeout: timedelta | None = None
) -> Runtime:
    """The runtime of a rank whose default process group, if the mesh needs one, stands already.

    `timeout` is what the groups are made with; None is torch's own.
    """
    runtime = Runtime(rank, mesh.world, local_rank, device, mesh, coordinates(mesh, rank))
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for axes in GROUPS:
        wide = tuple(axis for axis in axes if runtime.size(axis) > 1)
        members = tuple(runtime.ranks(*wide))
        if 1 < len(members) < mesh.world and wide not in runtime.groups:
            if members not in made:
                made[members] = dist.new_group(list(members), timeout, use_local_synchronization=True)
            runtime.groups[wide] = made[members]
    return runtime


def pick_device(config: Config, local_rank: int) -> torch.device:
    """The device of this rank: a GPU where `platform` asks for one, or has one under `auto`.

    With `launcher.share_device` ranks beyond the GPUs go round and round.

    Raises:
        UserError: `platform` names a GPU and there is none for this rank (3).
    """
    name = config.platform.name
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    found = torch.cuda.device_count()
    if config.launcher.share_device and found:
        local_rank %= found
    if local_rank >= found:
        raise UserError(
            f"platform={name}: no GPU for local rank {local_rank}, {found} found; platform=cpu", code=3
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _peers(mesh: MeshConfig, rank: int, axes: Iterable[str]) -> list[int]:
    """Ranks whose coordinates equal those of `rank` outside `axes`, ascending."""
    fixed = [axis for axis in AXES if axis not in set(axes)]
    mine = coordinates(mesh, rank)
    others = ((other, coordinates(mesh, other)) for other in range(mesh.world))
    return [other for other, place in others if all(getattr(place, a) == getattr(mine, a) for a in fixed)]
