"""Where this rank's shards lie in the tensors of canonical names (CKPT-1).

A parameter of a rank is whole, or a DTensor sharded on one dimension; routed experts are stacked, so that one
shard holds parts of many canonical tensors. Offsets come from the DTensor, never from a balanced division.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from src.models.names import Entry
from src.trainer.parallel.halves import Halves, View


@dataclass(frozen=True)
class LocalEntry:
    """What a rank holds of one canonical tensor."""

    parameter: str
    """Name of the module's parameter."""
    shape: tuple[int, ...]
    """Shape of the whole canonical tensor."""
    parts: list[tuple[tuple[int, ...], View]]
    """Offsets in the whole tensor, and a view of this rank's memory; empty if another rank has all of it."""


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank; shares its storage, has no gradient."""
    to_local = getattr(tensor, "to_local", None)
    return (tensor if to_local is None else to_local()).detach()


def shard_of(tensor: Tensor) -> tuple[int, int]:
    """Dimension that a DTensor is sharded on, and this rank's first index there; (0, 0) for a plain tensor.

    FSDP2 cuts a dimension as `torch.chunk` does: equal chunks, rounded up, the last ones smaller or empty.
    """
    placements = getattr(tensor, "placements", ())
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            mesh = tensor.device_mesh  # type: ignore[attr-defined]
            length = tensor.shape[placement.dim]
            chunk = -(-length // mesh.size(axis))
            start = min(mesh.get_local_rank(axis) * chunk, length)
            held = local(tensor).shape[placement.dim]
            assert held == min(chunk, length - start), (tuple(tensor.shape), held, chunk, start)
            return placement.dim, start
    return 0, 0


def local_entries(
    canonical: Mapping[str, Entry],
    parameters: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    experts: range,
    remainders: Mapping[str, Tensor],
) -> dict[str, LocalEntry]:
    """Canonical name → what this rank holds of it.

    Args:
        canonical: entries of the whole model.
        parameters: this rank's parameters by module name; DTensors where sharded.
        tensors: tensors by module name, shaped like the parameters or like their local shards (moments).
        experts: global ids of the experts that this rank's stacks hold.
        remainders: lower halves, by module name, of those `tensors` that are upper halves.
    """
    entries: dict[str, LocalEntry] = {}
    shards = {name: shard_of(parameters[name]) for name in tensors}
    for name, entry in canonical.items():
        if entry.parameter not in tensors or (entry.expert is not None and entry.expert not in experts):
            continue
        dim, start = shards[entry.parameter]
        expert = None if entry.expert is None else entry.expert - experts.start
        held = _parts(entry, local(tensors[entry.parameter]), dim, start, expert)
        parts: list[tuple[tuple[int, ...], View]] = [*held]
        if entry.parameter in remainders:
            lows = _parts(entry, remainders[entry.parameter], dim, start, expert)
            parts = [(o, Halves(high, low)) for (o, high), (_, low) in zip(held, lows, strict=True)]
        entries[name] = LocalEntry(entry.parameter, entry.shape, parts)
    return entries


def _parts(
    entry: Entry, held: Tensor, dim: int, start: int, expert: int | None
) -> list[tuple[tuple[int, ...], Tensor]]:
    """The part of `entry` in `held`, whose dimension `dim` begins at `start`; `expert` indexes the stack."""
    rest = (0,) * (len(entry.shape) - 1)
    if expert is None:
        assert dim == 0, entry
        return [((start, *rest), held)] if held.numel() else []
    if dim == 0:
        expert, first = expert - start, 0
        if not 0 <= expert < held.shape[0]:
            return []
    else:
        assert dim == 1, entry
        first = start
    if entry.transposed:
        return [((0, first), held[expert].T[entry.rows or slice(None)])]
    matrix = held[expert]
    if entry.rows is not None and entry.rows.step:
        assert dim == 0, entry
        return [((0, *rest), matrix[entry.rows])]
    begin = 0 if entry.rows is None else entry.rows.start
    low, high = max(first, begin), min(first + matrix.shape[0], begin + entry.shape[0])
    return [((low - begin, *rest), matrix[low - first : high - first])] if low < high else []
