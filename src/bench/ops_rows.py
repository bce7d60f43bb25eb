"""Operations on the tokens and rows of a mixture's layer that memory bounds (PERF-9, PERF-10).

Bytes are what has to be read and written once: inputs, outputs, upstream gradients and gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from src.bench.op import FORWARD, TRAINING, Cost, Side, Subject
from src.bench.op_shapes import Shape, choose, popularity
from src.bench.place import Key, Place
from src.bench.stopwatch import Inputs
from src.kernels.declaration import EAGER, Need

WIDE = 4
"""Bytes of an fp32 number and of an index."""


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
    need: Need | None = None
    """What the registry is asked for."""

    def subject(self, case: str, where: Place, sizes: dict[str, Any]) -> Subject:
        """Every implementation against plain torch."""
        known = self.registry or self.name
        there, missing = where.split(known, self.need)
        auto = where.auto(known, self.need)
        cost = {FORWARD: Cost(bytes=self.forward)}
        if self.backward is not None:
            cost[TRAINING] = Cost(bytes=self.forward + self.backward)
        sides = []
        for name, implementation in there.items():
            call, is_compiled = where.as_trained(self.call, implementation)
            what = ((self.name, name), call, cost, self.leaves, self.grads)
            sides.append(Side(*what, is_auto=name == auto, is_compiled=is_compiled))
        other: Key = (self.name, EAGER)
        return Subject(case, dict(sizes), self.make, sides, other, missing)


def norm(shape: Shape, where: Place) -> Operation:
    """x, y; x, dy, dx."""
    part = shape.tokens * shape.width * where.dtype.itemsize

    def make() -> Inputs:
        x_TD, grad_TD = (where.normal(shape.tokens, shape.width) for _ in range(2))
        return {"x": x_TD.requires_grad_(), "gain": where.leaf(shape.width), "grad": grad_TD}

    def call(function: Callable[..., Any], inputs: Inputs) -> Any:
        return function(inputs["x"], inputs["gain"], 1e-6)[0]

    return Operation("rms_norm", call, make, 2 * part, 3 * part, ("x", "gain"))


def routing(shape: Shape, where: Place) -> list[Operation]:
    """The router's logits, choice of experts, order of rows, and forward the last two together (PERF-10)."""
    scores, chosen = shape.tokens * shape.experts * WIDE, shape.rows * WIDE
    ids, sort = partial(_ids, shape, where), where.ops().sort_by_expert

    def scored() -> Inputs:
        sizes = (shape.tokens, shape.experts), (shape.tokens, shape.top_k)
        return {
            "logits": where.leaf(*sizes[0], dtype=torch.float32),
            "grad": where.normal(*sizes[1], dtype=torch.float32),
        }

    def route(function: Callable[..., Any], inputs: Inputs) -> Any:
        groups = {"groups": 1, "groups_kept": 1, "renormalise": True, "scale": 1.0}
        return function(inputs["logits"], shape.top_k, **groups)

    def weigh(function: Callable[..., Any], inputs: Inputs) -> Any:
        return route(function, inputs).weights_TK

    def order(function: Callable[..., Any], inputs: Inputs) -> Any:
        return function(inputs["ids"], shape.experts)

    def both(function: Callable[..., Any], inputs: Inputs) -> Any:
        return sort(route(function, inputs).ids_TK, shape.experts)

    forward, sorting = 2 * scores + 2 * chosen, 3 * chosen + shape.experts * WIDE
    return [
        router(shape, where),
        Operation("route", weigh, scored, forward, 2 * scores + 2 * chosen, ("logits",)),
        Operation("sort_by_expert", order, lambda: {"ids": ids()}, sorting, None),
        Operation("route_and_sort", both, scored, forward + sorting, None, registry="route"),
    ]


def router(shape: Shape, where: Place) -> Operation:
    """x, w, logits; x, w, their gradients and that of the logits."""
    T, E, D = shape.tokens, shape.experts, shape.width
    tokens, weight, logits = T * D * where.dtype.itemsize, E * D * WIDE, T * E * WIDE

    def make() -> Inputs:
        x_TD, w_ED = where.leaf(T, D), where.leaf(E, D, std=0.02, dtype=torch.float32)
        return {"x": x_TD, "w": w_ED, "grad": where.normal(T, E, dtype=torch.float32)}

    def project(function: Callable[..., Any], inputs: Inputs) -> Any:
        return function(inputs["x"], inputs["w"])

    moved = (tokens + weight + logits, 2 * tokens + 2 * weight + logits)
    return Operation("router_linear", project, make, *moved, ("x", "w"))


def _ids(shape: Shape, where: Place) -> Tensor:
    return choose(shape, popularity(shape.experts, "skewed", where.device), where)


def expert_rows(shape: Shape, where: Place) -> list[Operation]:
    """Copies into rows, the activation between the products, and the weighted sum."""
    size, T, N, D, K = where.dtype.itemsize, shape.tokens, shape.rows, shape.width, shape.top_k
    outer, tokens, places = N * D * size, T * D * size, N * WIDE
    ops = where.ops()

    def order() -> Inputs:
        order = ops.sort_by_expert(_ids(shape, where), shape.experts)
        return {"tokens": order.row_slot_N // K, "slots": order.slot_row_N.view(T, K)}

    def make() -> Inputs:
        return order() | {"x": where.leaf(T, D), "grad": where.normal(N, D)}

    def summed() -> Inputs:
        weights_TK = where.normal(T, K, dtype=torch.float32).softmax(-1).requires_grad_()
        y_ND, residual_TD, grad_TD = where.leaf(N, D), where.leaf(T, D), where.normal(T, D)
        return order() | {"y": y_ND, "weights": weights_TK, "residual": residual_TD, "grad": grad_TD}

    def move(function: Callable[..., Any], inputs: Inputs) -> Any:
        return function(inputs["x"], inputs["tokens"], inputs["slots"])

    def combine(function: Callable[..., Any], inputs: Inputs) -> Any:
        return function(*(inputs[name] for name in ("y", "slots", "weights", "residual")))

    copied = tokens + outer + places
    sums = (2 * tokens + outer + 2 * places, tokens + 2 * outer + 3 * places)
    return [
        Operation("permute", move, make, copied, copied, ("x",)),
        *activation(shape, where),
        Operation("combine", combine, summed, *sums, ("y", "weights", "residual")),
    ]


def activation(shape: Shape, where: Place) -> list[Operation]:
    """The gated activation as the family has it, and the biases of its experts, if they have some."""
    size, N, F, E = where.dtype.itemsize, shape.rows, shape.expert_size, shape.experts
    inner, bias = N * F * size, 2 * E * F * size
    config: Any = shape.config
    is_clamped = shape.family == "gpt_oss"
    bounds = {"limit": config.swiglu_limit, "alpha": config.swiglu_alpha} if is_clamped else {}

    def make() -> Inputs:
        return {"x": where.leaf(N, 2 * F), "grad": where.normal(N, F)}

    def activate(function: Callable[..., Any], inputs: Inputs) -> Any:
        return function(inputs["x"], **bounds)

    def biased() -> Inputs:
        offs_E = _ids(shape, where).flatten().bincount(minlength=E).cumsum(0, dtype=torch.int32)
        x_NM, bias_EM = where.leaf(N, 2 * F), where.leaf(E, 2 * F)
        return {"x": x_NM, "bias": bias_EM, "offs": offs_E, "grad": where.normal(N, 2 * F)}

    def add(function: Callable[..., Any], inputs: Inputs) -> Any:
        return function(inputs["x"], inputs["bias"], inputs["offs"])

    need = shape.needs.get("swiglu")
    found = [Operation("swiglu", activate, make, 3 * inner, 5 * inner, ("x",), need=need)]
    if is_clamped:
        moved = (4 * inner + bias + E * WIDE, 4 * inner + bias + E * WIDE)
        found.append(Operation("expert_bias", add, biased, *moved, ("x", "bias")))
    return found
