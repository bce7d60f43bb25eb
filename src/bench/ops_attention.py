"""Attention of the three families' shapes, causal, each sample one document (PERF-6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from src.bench.op import FORWARD, TRAINING, Cost, Inputs, Side, Subject
from src.bench.place import Place
from src.kernels.declaration import Need

BACKWARD = 3.5
"""Forward and backward over forward: a fused backward has five products, that of the scores again."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one call."""

    heads: int
    groups: int
    """Heads of keys and values."""
    key: int
    value: int
    batch: int = 4
    seq: int = 4096

    def cost(self) -> dict[str, Cost]:
        """Two products over half of the scores: 2·S²/2·(C + U) operations a head."""
        flops = self.batch * self.heads * self.seq**2 * (self.key + self.value)
        return {FORWARD: Cost(flops), TRAINING: Cost(int(BACKWARD * flops))}

    def need(self) -> Need:
        """What the registry is asked for."""
        features = {"unequal_widths": self.key != self.value, "gqa": self.heads != self.groups}
        widths = {"key": self.key, "value": self.value}
        return Need(frozenset(name for name, is_so in features.items() if is_so), widths)


SHAPES = {
    "mla": Shape(16, 16, 192, 128),
    "mha": Shape(16, 16, 128, 128),
    "gqa": Shape(32, 4, 128, 128),
    "gpt_oss": Shape(64, 8, 64, 64),
    "tiny": Shape(4, 2, 24, 16, batch=2, seq=40),
}


def subjects(name: str, where: Place) -> Sequence[Subject]:
    """One: every implementation, against the fastest."""
    shape = SHAPES[name]
    functions, missing = where.split("attention", shape.need())
    sides = [
        Side(("attention", key), partial(_call, function, shape), shape.cost(), ("q", "k", "v"), ("grad",))
        for key, function in functions.items()
    ]
    return [Subject(name, vars(shape), partial(_make, shape, where), sides, None, missing)]


def _make(shape: Shape, where: Place) -> Inputs:
    lead = (shape.batch, shape.seq)
    return {
        "q": where.leaf(*lead, shape.heads, shape.key),
        "k": where.leaf(*lead, shape.groups, shape.key),
        "v": where.leaf(*lead, shape.groups, shape.value),
        "grad": where.normal(*lead, shape.heads, shape.value),
    }


def _call(function: Callable[..., Any], shape: Shape, inputs: Inputs) -> Tensor:
    out: Tensor = function(inputs["q"], inputs["k"], inputs["v"], shape.key**-0.5, None)[0]
    return out


CASES = {name: partial(subjects, name) for name in SHAPES}
