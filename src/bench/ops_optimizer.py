"""What follows the backward: sums over micro-batches, the gradient norm, the update (PERF-8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from src.bench.op import FORWARD, Cost, Side, Subject
from src.bench.place import Place
from src.bench.stopwatch import Inputs
from src.kernels.adamw import Adam
from src.kernels.declaration import EAGER
from src.kernels.halves import split

Shapes = tuple[tuple[int, ...], ...]

SHAPES: dict[str, Shapes] = {
    "deepseek_v2_layer": (
        *((3072, 2048), (576, 2048), (4096, 512), (2048, 2048), (2048,), (2048,), (64, 2048)),
        *((64, 2816, 2048), (64, 2048, 1408), (5632, 2048), (2048, 2816)),
    ),
    "qwen3_head": ((151936, 2048),),
    "tiny": ((37, 24), (24,)),
}
"""Parameters that are updated one by one."""


@dataclass(frozen=True)
class Layout:
    """In which dtypes a parameter is kept; `plain` is that of compute for all of them."""

    master: torch.dtype | None = torch.float32
    """Of the parameter and its second moment; None is that of compute."""
    first: torch.dtype | None = None
    """Of the first moment; None is that of the master."""
    is_split: bool = False
    """The master lies in two halves, of which the upper one computes."""

    def make(self, shapes: Shapes, where: Place) -> Inputs:
        """Random parameters with all that an update reads."""
        wide, is_apart = self.master or where.dtype, not self.is_split and self.master is not None

        def states(std: float, dtype: torch.dtype) -> list[Tensor]:
            return [where.normal(*shape, std=std, dtype=dtype) for shape in shapes]

        halves = [split(p) if self.is_split else (p, None) for p in states(0.02, wide)]
        scalars = (torch.tensor(value, device=where.device) for value in (100.0, 1.0, 0.0))
        return {
            "p": [high for high, _ in halves],
            "m": states(1e-3, self.first or wide),
            "v": [v.square_() for v in states(1e-3, wide)],
            "copy": [where.normal(*shape) if is_apart else None for shape in shapes],
            "low": [low for _, low in halves],
            "scalars": tuple(scalars),
            **_gradients(shapes, where),
        }

    def bytes_moved(self, compute: torch.dtype) -> int:
        """Of one parameter: masters and moments read and written, the gradient read, a copy written."""
        wide = self.master or compute
        kept = 2 * wide.itemsize + (self.first or wide).itemsize
        is_apart = not self.is_split and self.master is not None
        return 2 * kept + compute.itemsize + (compute.itemsize if is_apart else 0)


LAYOUTS = {
    "master": Layout(),
    "split": Layout(is_split=True),
    "split_bf16": Layout(first=torch.bfloat16, is_split=True),
    "plain": Layout(master=None),
}


def subjects(name: str, shapes: Shapes, where: Place) -> Sequence[Subject]:
    """The update in each layout, sums over micro-batches, the norm; each against plain torch."""
    count, narrow = sum(map(prod, shapes)), where.dtype.itemsize
    found = []
    for layout, kept in LAYOUTS.items():
        make, moved = partial(kept.make, shapes, where), kept.bytes_moved(where.dtype) * count
        found.append(_over("adamw", f"{name} {layout}", shapes, make, _step, moved, where))
    gradients, totals = partial(_gradients, shapes, where), partial(_with_totals, shapes, where)
    return [
        *found,
        _over("accumulate", f"{name} first", shapes, gradients, _add, (4 + narrow) * count, where),
        _over("accumulate", f"{name} later", shapes, totals, _add, (8 + narrow) * count, where),
        _over("grad_norm", name, shapes, gradients, _norm, narrow * count, where),
    ]


def _over(
    operation: str,
    case: str,
    shapes: Shapes,
    make: Callable[[], Inputs],
    call: Callable[..., Any],
    moved: int,
    where: Place,
) -> Subject:
    """Every implementation of an operation on all parameters."""
    there, missing = where.split(operation)
    auto, cost = where.auto(operation), {FORWARD: Cost(bytes=moved)}
    sides = [
        Side((operation, key), partial(call, known.function), cost, is_auto=key == auto)
        for key, known in there.items()
    ]
    return Subject(case, _sizes(shapes), make, sides, (operation, EAGER), missing)


def _sizes(shapes: Shapes) -> dict[str, int]:
    return {"parameters": sum(map(prod, shapes)), "tensors": len(shapes)}


def _gradients(shapes: Shapes, where: Place) -> Inputs:
    return {"g": [where.normal(*shape, std=1e-3) for shape in shapes]}


def _with_totals(shapes: Shapes, where: Place) -> Inputs:
    totals = [where.normal(*shape, std=1e-3, dtype=torch.float32) for shape in shapes]
    return {"total": totals, **_gradients(shapes, where)}


def _step(function: Callable[..., Any], inputs: Inputs) -> None:
    """A clip of 1 costs as any other and lets a gradient that is scaled in place stay what it was."""
    step, clip, skip = inputs["scalars"]
    adam = Adam(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, step=step, clip=clip, skip=skip)
    names = ("p", "g", "m", "v", "copy", "low")
    for p, g, m, v, copy, low in zip(*(inputs[name] for name in names), strict=True):
        function(p, g, m, v, copy, 0.1, adam, low)


def _add(function: Callable[..., Any], inputs: Inputs) -> None:
    parts = inputs["g"]
    for total, part in zip(inputs.get("total", [None] * len(parts)), parts, strict=True):
        function(total, part, torch.float32)


def _norm(function: Callable[..., Any], inputs: Inputs) -> Tensor:
    square: Tensor = function(inputs["g"], torch.float32)
    return square
