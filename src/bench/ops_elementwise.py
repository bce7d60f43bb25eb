"""Operations that memory bounds: norms, rotations, activation, copies and sums of rows, routing (PERF-9, 10).

Bytes are what has to be read and written once: inputs, outputs, upstream gradients and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from src.bench.op import FORWARD, TRAINING, Cost, Inputs, Side, Subject
from src.bench.ops_moe import SHAPES as LAYERS
from src.bench.ops_moe import Shape, choose, popularity
from src.bench.place import Key, Place

WIDE = 4
"""Bytes of an fp32 number and of an index."""


@dataclass(frozen=True)
class Heads:
    """Those of attention: of grouped queries, or latent ones with a rotated part."""

    queries: int
    groups: int
    key: int
    is_normed: bool = False
    value: int = 0
    rotated: int = 0
    """Width of the rotated part of a latent key; 0 for grouped queries, where all of it is."""


HEADS = {
    "deepseek_v2": Heads(16, 16, 192, value=128, rotated=64),
    "qwen3": Heads(32, 4, 128, is_normed=True),
    "gpt_oss": Heads(64, 8, 64),
    "tiny": Heads(4, 2, 12, is_normed=True),
}


@dataclass(frozen=True)
class Operation:
    """One of them at one shape."""

    name: str
    call: Callable[[Callable[..., Any], Inputs], Any]
    """From an implementation and inputs to what `grads` are of."""
    make: Callable[[], Inputs]
    forward: int
    """Bytes."""
    backward: int | None
    """Bytes besides; None without one."""
    leaves: tuple[str, ...] = ()
    grads: tuple[str, ...] = ("grad",)
    registry: str | None = None
    """Its name there, if it has another."""

    def subject(self, case: str, where: Place, sizes: dict[str, Any]) -> Subject:
        """Every implementation against plain torch."""
        known = self.registry or self.name
        functions, missing = where.split(known)
        cost = {FORWARD: Cost(bytes=self.forward)}
        if self.backward is not None:
            cost[TRAINING] = Cost(bytes=self.forward + self.backward)
        sides = [
            Side((self.name, key), partial(self.call, function), cost, self.leaves, self.grads)
            for key, function in functions.items()
        ]
        other: Key = (self.name, "eager")
        return Subject(case, sizes, self.make, sides, other, missing)


def subjects(name: str, where: Place) -> Sequence[Subject]:
    """Every operation at the shapes of one model."""
    shape, heads = LAYERS[name], HEADS[name]
    of_layer = {**vars(shape)}
    operations = [norm(shape, where), *rows(shape, where), *routing(shape, where)]
    rotation = latent(shape, heads, where) if heads.rotated else rotary(shape, heads, where)
    found = [operation.subject(name, where, of_layer) for operation in operations]
    return [*found, rotation.subject(name, where, {**vars(heads), "tokens": shape.tokens})]


def norm(shape: Shape, where: Place) -> Operation:
    """x, y; x, dy, dx."""
    part = shape.tokens * shape.width * where.dtype.itemsize

    def make() -> Inputs:
        x_TD, grad_TD = (where.normal(shape.tokens, shape.width) for _ in range(2))
        return {"x": x_TD.requires_grad_(), "gain": where.leaf(shape.width), "grad": grad_TD}

    def call(function: Callable[..., Any], inputs: Inputs) -> Any:
        return function(inputs["x"], inputs["gain"], 1e-6)

    return Operation("rms_norm", call, make, 2 * part, 3 * part, ("x", "gain"))


def rows(shape: Shape, where: Place) -> list[Operation]:
    """The activation, copies into rows and back, and their weighted sum."""
    size, T, N, D, K = where.dtype.itemsize, shape.tokens, shape.rows, shape.width, shape.top_k
    inner, outer, tokens, places = N * shape.expert_size * size, N * D * size, T * D * size, N * WIDE

    def make(width: int, grad: tuple[int, ...], count: int) -> Inputs:
        ids_TK = choose(shape, popularity(shape.experts, "skewed", where.device), where)
        order = where.chosen("sort_by_expert")(ids_TK, shape.experts)
        return {"x": where.leaf(count, width), "order": order, "grad": where.normal(*grad)}

    def summed() -> Inputs:
        weights_TK = where.normal(T, K, dtype=torch.float32).softmax(-1).requires_grad_()
        y_TKD, residual_TD, grad_TD = where.leaf(T, K, D), where.leaf(T, D), where.normal(T, D)
        return {"y": y_TKD, "weights": weights_TK, "residual": residual_TD, "grad": grad_TD}

    def activate(function: Callable[..., Any], inputs: Inputs) -> Any:
        return function(inputs["x"])

    def move(function: Callable[..., Any], inputs: Inputs) -> Any:
        order = inputs["order"]
        return function(inputs["x"], order.row_slot_N, order.slot_row_N, K)

    def combine(function: Callable[..., Any], inputs: Inputs) -> Any:
        return function(inputs["y"], inputs["weights"], inputs["residual"])

    F = shape.expert_size
    copied = tokens + outer + places
    sums = (2 * tokens + outer + places, tokens + 2 * outer + 2 * places)
    return [
        Operation("swiglu", activate, partial(make, 2 * F, (N, F), N), 3 * inner, 5 * inner, ("x",)),
        Operation("permute", move, partial(make, D, (N, D), T), copied, copied, ("x",)),
        Operation(
            *("unpermute", move, partial(make, D, (T, K, D), N), 2 * outer + places, 2 * outer + places),
            leaves=("x",),
        ),
        Operation("combine", combine, summed, *sums, ("y", "weights", "residual")),
    ]


def routing(shape: Shape, where: Place) -> list[Operation]:
    """Scores and choice of experts with their gradient, and forward with the sort that follows."""
    scores, chosen = shape.tokens * shape.experts * WIDE, shape.rows * WIDE

    def make() -> Inputs:
        logits_TE = where.leaf(shape.tokens, shape.experts, dtype=torch.float32)
        return {"logits": logits_TE, "grad": where.normal(shape.tokens, shape.top_k, dtype=torch.float32)}

    def routed(function: Callable[..., Any], inputs: Inputs) -> Any:
        groups = {"groups": 1, "groups_kept": 1, "renormalise": True, "scale": 1.0}
        return function(inputs["logits"], shape.top_k, **groups)

    def weights(function: Callable[..., Any], inputs: Inputs) -> Tensor:
        found: Tensor = routed(function, inputs).weights_TK
        return found

    def ordered(function: Callable[..., Any], inputs: Inputs) -> Any:
        return where.chosen("sort_by_expert")(routed(function, inputs).ids_TK, shape.experts)

    forward = 2 * scores + 2 * chosen
    return [
        Operation("route", weights, make, forward, 2 * scores + 2 * chosen, ("logits",)),
        Operation("route_and_sort", ordered, make, forward + 3 * chosen, None, registry="route"),
    ]


def rotary(shape: Shape, heads: Heads, where: Place) -> Operation:
    """Queries and keys in and out; back their gradients, and where they are normed themselves once more."""
    T, C = shape.tokens, heads.key
    part = T * (heads.queries + heads.groups) * C * where.dtype.itemsize
    angles = T * C * WIDE
    gains = ("q_gain", "k_gain") if heads.is_normed else ()

    def make() -> Inputs:
        found: Inputs = {gain: where.leaf(C) for gain in gains}
        for name, count in (("q", heads.queries), ("k", heads.groups)):
            found |= {name: where.leaf(1, T, count, C), f"d{name}": where.normal(1, T, count, C)}
        return found | _angles(T, C // 2, where)

    def call(function: Callable[..., Any], inputs: Inputs) -> Any:
        pair = tuple(inputs[gain] for gain in gains) or None
        return function(inputs["q"], inputs["k"], inputs["cos"], inputs["sin"], pair, 1e-6)

    back = (3 if heads.is_normed else 2) * part + angles
    return Operation("rotary_heads", call, make, 2 * part + angles, back, ("q", "k", *gains), ("dq", "dk"))


def latent(shape: Shape, heads: Heads, where: Place) -> Operation:
    """Projections in, queries, keys and values out; back the gradients of these in, of those out."""
    T, H, R = shape.tokens, heads.queries, heads.rotated
    both = heads.key - R + heads.value
    moved = T * (H * (3 * heads.key + both + heads.value) + R) * where.dtype.itemsize + T * R * WIDE

    def make() -> Inputs:
        names, widths = ("dq", "dk", "dv"), (heads.key, heads.key, heads.value)
        inputs = {
            "q": where.leaf(1, T, H, heads.key),
            "kv": where.leaf(1, T, H, both),
            "k": where.leaf(1, T, R),
        }
        grads = {name: where.normal(1, T, H, width) for name, width in zip(names, widths, strict=True)}
        return inputs | grads | _angles(T, R // 2, where)

    def call(function: Callable[..., Any], inputs: Inputs) -> Any:
        return function(*(inputs[name] for name in ("q", "kv", "k", "cos", "sin")))

    return Operation("latent_heads", call, make, moved, moved, ("q", "kv", "k"), ("dq", "dk", "dv"))


def _angles(tokens: int, pairs: int, where: Place) -> Inputs:
    angles_BSR = where.normal(1, tokens, pairs, dtype=torch.float32)
    return {"cos": angles_BSR.cos(), "sin": angles_BSR.sin()}


CASES = {name: partial(subjects, name) for name in HEADS}
