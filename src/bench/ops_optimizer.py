"""What follows the backward: sums over micro-batches, the gradient norm, the update (PERF-8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from src.bench.op import FORWARD, Cost, Inputs, Side, Subject
from src.bench.place import Place
from src.kernels.adamw import Adam

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


def subjects(name: str, where: Place) -> Sequence[Subject]:
    """Sums, norm, and the update in both layouts of states, each against plain torch."""
    shapes = SHAPES[name]
    count = sum(map(prod, shapes))
    narrow = where.dtype.itemsize
    return [
        _update(name, "master", torch.float32, where),
        _update(name, "plain", where.dtype, where),
        _sums(name, "first", partial(_gradients, shapes, where), (4 + narrow) * count, where),
        _sums(name, "later", partial(_with_totals, shapes, where), (8 + narrow) * count, where),
        _norm(name, narrow * count, where),
    ]


def _update(name: str, states: str, dtype: torch.dtype, where: Place) -> Subject:
    shapes = SHAPES[name]
    functions, missing = where.split("adamw")
    cost = _bytes(update_bytes(sum(map(prod, shapes)), dtype, where.dtype))
    sides = [Side(("adamw", key), partial(_step, function), cost) for key, function in functions.items()]
    sizes = {"parameters": sum(map(prod, shapes)), "tensors": len(shapes), "states": states}
    make = partial(_states, shapes, dtype, where)
    return Subject(f"{name} {states}", sizes, make, sides, ("adamw", "eager"), missing)


def update_bytes(parameters: int, states: torch.dtype, compute: torch.dtype) -> int:
    """Parameter and both moments read and written, the gradient read, a narrower copy written if apart."""
    apart = compute.itemsize if states != compute else 0
    return parameters * (6 * states.itemsize + compute.itemsize + apart)


def _sums(name: str, which: str, make: Callable[[], Inputs], moved: int, where: Place) -> Subject:
    functions, missing = where.split("accumulate")
    sides = [
        Side(("accumulate", key), partial(_add, function), _bytes(moved))
        for key, function in functions.items()
    ]
    sizes = {"parameters": sum(map(prod, SHAPES[name])), "tensors": len(SHAPES[name]), "which": which}
    return Subject(f"{name} {which}", sizes, make, sides, ("accumulate", "eager"), missing)


def _bytes(moved: int) -> dict[str, Cost]:
    return {FORWARD: Cost(bytes=moved)}


def _gradients(shapes: Shapes, where: Place) -> Inputs:
    return {"g": [where.normal(*shape, std=1e-3) for shape in shapes]}


def _with_totals(shapes: Shapes, where: Place) -> Inputs:
    totals = [where.normal(*shape, std=1e-3, dtype=torch.float32) for shape in shapes]
    return {"total": totals, **_gradients(shapes, where)}


def _states(shapes: Shapes, dtype: torch.dtype, where: Place) -> Inputs:
    def states(std: float) -> list[Tensor]:
        return [where.normal(*shape, std=std, dtype=dtype) for shape in shapes]

    is_apart = dtype != where.dtype
    scalars = (torch.tensor(value, device=where.device) for value in (100.0, 1.0, 0.0))
    return {
        "p": states(0.02),
        "m": states(1e-3),
        "v": [v.square_() for v in states(1e-3)],
        "copy": [where.normal(*shape) if is_apart else None for shape in shapes],
        "scalars": tuple(scalars),
        **_gradients(shapes, where),
    }


def _step(function: Callable[..., Any], inputs: Inputs) -> None:
    """A clip of 1 costs as any other and lets a gradient that is scaled in place stay what it was."""
    step, clip, skip = inputs["scalars"]
    adam = Adam(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, step=step, clip=clip, skip=skip)
    for p, g, m, v, copy in zip(*(inputs[name] for name in ("p", "g", "m", "v", "copy")), strict=True):
        function(p, g, m, v, copy, 0.1, adam)


def _add(function: Callable[..., Any], inputs: Inputs) -> None:
    parts = inputs["g"]
    for total, part in zip(inputs.get("total", [None] * len(parts)), parts, strict=True):
        function(total, part, torch.float32)


def _norm(name: str, moved: int, where: Place) -> Subject:
    functions, missing = where.split("grad_norm")
    sides = [
        Side(("grad_norm", key), partial(_square, function), _bytes(moved))
        for key, function in functions.items()
    ]
    sizes = {"parameters": sum(map(prod, SHAPES[name])), "tensors": len(SHAPES[name])}
    make = partial(_gradients, SHAPES[name], where)
    return Subject(name, sizes, make, sides, ("grad_norm", "eager"), missing)


def _square(function: Callable[..., Any], inputs: Inputs) -> Tensor:
    total: Tensor = function(inputs["g"], torch.float32)
    return total


CASES = {name: partial(subjects, name) for name in SHAPES}
