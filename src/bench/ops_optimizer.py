"""What follows the backward: sums over micro-batches, the gradient norm, the update (PERF-8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def subjects(name: str, shapes: Shapes, where: Place) -> Sequence[Subject]:
    """The update in both layouts of states, sums over micro-batches, the norm; each against plain torch."""
    count = sum(map(prod, shapes))
    narrow = where.dtype.itemsize
    gradients, totals = partial(_gradients, shapes, where), partial(_with_totals, shapes, where)
    return [
        _update(f"{name} master", shapes, torch.float32, where),
        _update(f"{name} plain", shapes, where.dtype, where),
        _over("accumulate", f"{name} first", shapes, gradients, _add, (4 + narrow) * count, where),
        _over("accumulate", f"{name} later", shapes, totals, _add, (8 + narrow) * count, where),
        _norms(name, shapes, where),
    ]


def _update(case: str, shapes: Shapes, dtype: torch.dtype, where: Place) -> Subject:
    moved = update_bytes(sum(map(prod, shapes)), dtype, where.dtype)
    return _over("adamw", case, shapes, partial(_states, shapes, dtype, where), _step, moved, where)


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


def _norms(case: str, shapes: Shapes, where: Place) -> Subject:
    count = sum(map(prod, shapes))
    cost, key = {FORWARD: Cost(bytes=where.dtype.itemsize * count)}, ("grad_norm", EAGER)
    sides = [Side(key, _norm, cost, is_auto=True)]
    return Subject(case, _sizes(shapes), partial(_gradients, shapes, where), sides, key)


def _sizes(shapes: Shapes) -> dict[str, int]:
    return {"parameters": sum(map(prod, shapes)), "tensors": len(shapes)}


def update_bytes(parameters: int, states: torch.dtype, compute: torch.dtype) -> int:
    """Parameter and both moments read and written, the gradient read, a narrower copy written if apart."""
    apart = compute.itemsize if states != compute else 0
    return parameters * (6 * states.itemsize + compute.itemsize + apart)


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


def _norm(inputs: Inputs) -> Tensor:
    """As the step computes it on one rank: a norm of each tensor, then one of them."""
    norms = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in inputs["g"]])
    return norms.square().sum().sqrt()
