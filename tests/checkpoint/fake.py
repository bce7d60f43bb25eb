"""A backend without a computation: the tensors of a small model, cut over parts in any way.

Its values are a function of the canonical name alone: what any layout saved can be checked without it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from src.config import Config, MeshConfig
from src.models import names
from src.models.schema import DeepseekV2Config
from src.trainer.checkpoint.contents import Backend
from src.trainer.runtime import Runtime, join
from tests.models.odd import deepseek_v2

EXPERTS = 6
MODEL = deepseek_v2(num_layers=2, num_experts=EXPERTS, num_groups=3, vocab_size=31, hidden_size=5)
STACK = "model.layers.1.mlp.experts"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Entry:
    """As the engine's."""

    shape: tuple[int, ...]
    parts: list[tuple[tuple[int, ...], Tensor]]


def value(name: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor of a canonical name."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def canonical() -> dict[str, tuple[int, ...]]:
    """Canonical names of the parameters and their shapes."""
    return {name: entry.shape for name, entry in names.canonical(MODEL).items()}


class Fake:
    """The whole model in one process."""

    def __init__(self) -> None:
        self.parameters = {name: torch.zeros(shape) for name, shape in names.parameters(MODEL).items()}
        self.extra = {"balance.load.1": torch.zeros(EXPERTS)}

    def local_entries(self, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Entry]:
        """Every entry, whole: a tensor, an expert's matrix in a stack, or rows of one."""
        entries, tensors = {}, self.parameters if tensors is None else tensors
        for name, entry in names.canonical(MODEL).items():
            view = tensors[entry.parameter]
            view = view if entry.expert is None else view[entry.expert]
            view = view if entry.rows is None else view[entry.rows]
            entries[name] = Entry(entry.shape, [((0,) * view.dim(), view)])
        return entries

    def extra_state(self) -> dict[str, Tensor]:
        """One count per expert."""
        return self.extra

    def load_extra_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy them in."""
        for name, tensor in self.extra.items():
            tensor.copy_(tensors[name])

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Zeros, shaped like the parameters."""
        return {m: {n: torch.zeros_like(t) for n, t in self.parameters.items()} for m in MOMENTS}


def _boxes(
    backend: Backend, moments: Mapping[str, Mapping[str, Tensor]]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Saved name, local view and the value it should have, for every box that this rank holds."""
    for suffix, tensors in (("", backend.parameters), *((f"::{m}", t) for m, t in moments.items())):
        for name, entry in backend.local_entries(tensors).items():
            whole = value(name + suffix, entry.shape)
            for offsets, view in entry.parts:
                span = tuple(slice(o, o + s) for o, s in zip(offsets, view.shape, strict=True))
                yield name + suffix, view, whole[span]
    for name, tensor in backend.extra_state().items():
        yield f"extra.{name}", tensor, value(f"extra.{name}", tuple(tensor.shape))


def fill(backend: Backend, moments: Mapping[str, Mapping[str, Tensor]], factor: float = 1) -> None:
    """Give every tensor the value of its name, times `factor`."""
    for _, view, wanted in _boxes(backend, moments):
        view.copy_(wanted * factor)


def wrong(backend: Backend, moments: Mapping[str, Mapping[str, Tensor]], factor: float = 1) -> list[str]:
    """Names whose tensors do not have the value of their name, times `factor`."""
    return [name for name, view, wanted in _boxes(backend, moments) if not torch.equal(view, wanted * factor)]


def config(model: DeepseekV2Config = MODEL, **changes: object) -> Config:
    """A config with fields replaced: `seed=1`, `data__allow_change=True`."""
    settings = Config(model=model)
    for key, new in changes.items():
        group, _, leaf = key.rpartition("__")
        setattr(getattr(settings, group) if group else settings, leaf, new)
    return settings


def alone() -> Runtime:
    """One rank without a process group."""
    return join(MeshConfig(), 0, 0, torch.device("cpu"))
