"""A backend without a model: a few tensors, one of them a stack of experts, cut over parts in any way.

Its values are a function of the canonical name alone: what any layout saved can be checked without it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from src.config import Config, MeshConfig
from src.models.schema import DeepseekV2Config
from src.trainer.runtime import Runtime, join

EXPERTS, F, D = 6, 3, 5
PLAIN = {
    "model.embed_tokens.weight": (11, D),
    "model.layers.1.mlp.gate.weight": (EXPERTS, D),
    "model.norm.weight": (D,),
}
STACK = "model.layers.1.mlp.experts"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Entry:
    """As the engine's."""

    shape: tuple[int, ...]
    pieces: list[tuple[tuple[int, ...], Tensor]]


def value(name: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor of a canonical name."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def canonical() -> dict[str, tuple[int, ...]]:
    """Canonical names of the parameters and their shapes."""
    names: dict[str, tuple[int, ...]] = dict(PLAIN)
    for expert in range(EXPERTS):
        names |= {f"{STACK}.{expert}.{p}_proj.weight": (F, D) for p in ("gate", "up")}
        names[f"{STACK}.{expert}.down_proj.weight"] = (D, F)
    return names


class Fake:
    """Part `part` of `parts`: rows of each tensor in chunks by ceiling, as FSDP2 cuts dimension 0."""

    def __init__(self, part: int = 0, parts: int = 1) -> None:
        self._part, self._parts = part, parts
        shapes = {**PLAIN, f"{STACK}.gate_up": (EXPERTS, 2 * F, D), f"{STACK}.down": (EXPERTS, D, F)}
        self._spans = {name: self._span(shape[0]) for name, shape in shapes.items()}
        self.parameters = {
            name: torch.zeros(self._spans[name].stop - self._spans[name].start, *shape[1:])
            for name, shape in shapes.items()
        }
        self.extra = {"balance.f.1": torch.zeros(EXPERTS)}

    def _span(self, rows: int) -> slice:
        height = -(-rows // self._parts)
        return slice(min(rows, self._part * height), min(rows, (self._part + 1) * height))

    def local_entries(self, tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
        """Boxes of the plain tensors, and one box per expert and projection."""
        entries: dict[str, Entry] = {}
        for name, tensor in tensors.items():
            span = self._spans[name]
            if name in PLAIN:
                start = (span.start, *[0] * (tensor.dim() - 1))
                entries[name] = Entry(PLAIN[name], [(start, tensor)])
                continue
            for row, expert in enumerate(range(span.start, span.stop)):
                for projection, view in _projections(name, tensor[row]).items():
                    full = f"{STACK}.{expert}.{projection}_proj.weight"
                    entries[full] = Entry(tuple(view.shape), [((0, 0), view)])
        return entries

    def extra_state(self) -> dict[str, Tensor]:
        """One count per expert."""
        return self.extra

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Zeros, shaped like the parameters."""
        return {m: {n: torch.zeros_like(t) for n, t in self.parameters.items()} for m in MOMENTS}


def _projections(name: str, matrix: Tensor) -> dict[str, Tensor]:
    return {"gate": matrix[:F], "up": matrix[F:]} if name.endswith("gate_up") else {"down": matrix}


def _boxes(fake: Fake, moments: Mapping[str, Mapping[str, Tensor]]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Saved name, local view and the value it should have, for every box that the fake holds."""
    for suffix, tensors in (("", fake.parameters), *((f"::{m}", t) for m, t in moments.items())):
        for name, entry in fake.local_entries(tensors).items():
            whole = value(name + suffix, entry.shape)
            for offsets, view in entry.pieces:
                span = tuple(slice(o, o + s) for o, s in zip(offsets, view.shape, strict=True))
                yield name + suffix, view, whole[span]
    for name, tensor in fake.extra.items():
        yield f"extra.{name}", tensor, value(f"extra.{name}", tuple(tensor.shape))


def fill(fake: Fake, moments: Mapping[str, Mapping[str, Tensor]], factor: float = 1) -> None:
    """Give every tensor the value of its name, times `factor`."""
    for _, view, wanted in _boxes(fake, moments):
        view.copy_(wanted * factor)


def wrong(fake: Fake, moments: Mapping[str, Mapping[str, Tensor]], factor: float = 1) -> list[str]:
    """Names whose tensors do not have the value of their name, times `factor`."""
    return [name for name, view, wanted in _boxes(fake, moments) if not torch.equal(view, wanted * factor)]


def config(**changes: object) -> Config:
    """A config; its model is not that of the fake, which nothing here looks at."""
    settings = Config(model=DeepseekV2Config(family="deepseek_v2", name="deepseek_v2", vocab_size=97))
    for key, new in changes.items():
        group, _, leaf = key.partition("__")
        setattr(getattr(settings, group), leaf, new) if leaf else setattr(settings, group, new)
    return settings


def alone() -> Runtime:
    """One rank without a process group."""
    return join(MeshConfig(), 0, 0, torch.device("cpu"))


def data_files(checkpoint: Path) -> list[Path]:
    """Files of tensors in a checkpoint."""
    return sorted(checkpoint.glob("*.distcp"))
