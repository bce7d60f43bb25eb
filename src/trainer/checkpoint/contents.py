"""What a checkpoint holds, by mesh-free names: parameters, moments, extra state (CKPT-1).

Parameters go by their canonical names, moments by ``<name>::<moment>``, other tensors of the backend (lagged
load counts and the like) by ``extra.<name>``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from src.trainer.checkpoint.shards import Shards
from src.trainer.parallel.halves import View, whole

EXTRA = "extra."


class Entry(Protocol):
    """What a rank holds of one canonical tensor."""

    @property
    def shape(self) -> Sequence[int]:
        """Of the whole tensor."""
        ...

    @property
    def parts(self) -> Sequence[tuple[Sequence[int], View]]:
        """Offsets in the whole tensor and a view of local memory, for each box that this rank holds."""
        ...


class Backend(Protocol):
    """What checkpoints need of a backend, whichever runs."""

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """This rank's parameters by their names in the module."""
        ...

    def local_entries(self, tensors: Mapping[str, Tensor] | None = None) -> Mapping[str, Entry]:
        """Canonical name → what this rank holds of it, in its masters or in tensors shaped like them."""
        ...

    def extra_state(self) -> Mapping[str, Tensor]:
        """Small tensors beside the parameters, by mesh-free names, whole on each rank that has them."""
        ...

    def load_extra_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `extra_state` gave."""
        ...


def weights(backend: Backend) -> dict[str, Shards]:
    """This rank's shards of the parameters, as views into them."""
    return _shards(backend.local_entries(), "")


def collect(backend: Backend, moments: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Shards]:
    """This rank's shards of everything that is saved, as views into the live tensors."""
    tensors = weights(backend)
    for moment, by_parameter in moments.items():
        tensors |= _shards(backend.local_entries(by_parameter), moment_name("", moment))
    return tensors | _extra(backend)


def _shards(entries: Mapping[str, Entry], suffix: str) -> dict[str, Shards]:
    shards = {}
    for name, entry in entries.items():
        boxes = [(tuple(offsets), view) for offsets, view in entry.parts if view.numel()]
        if boxes:
            shards[name + suffix] = Shards(tuple(entry.shape), boxes)
    return shards


def _extra(backend: Backend) -> dict[str, Shards]:
    return {EXTRA + name: Shards.whole(tensor) for name, tensor in backend.extra_state().items()}


def extra_state(tensors: Mapping[str, Shards]) -> dict[str, Tensor]:
    """The tensors of the backend's extra state among those of `collect`, by its own names."""
    return {n.removeprefix(EXTRA): whole(s.boxes[0][1]) for n, s in tensors.items() if n.startswith(EXTRA)}


def moment_name(parameter: str, moment: str) -> str:
    """Name of a parameter's moment."""
    return f"{parameter}::{moment}"


def is_weight(name: str) -> bool:
    """Whether the name is that of a parameter."""
    return "::" not in name and not name.startswith(EXTRA)
