"""A mixture's layer from sorted rows to its output, over the grouped products alone (PERF-5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from src.bench.op import FORWARD, TRAINING, Cost, Inputs, Side, Subject
from src.bench.place import Key, Place
from src.kernels.declaration import Need

LOADS = ("balanced", "skewed")
"""Experts in turn, or drawn by a popularity that is Dirichlet(0.5)."""
LEAVES = ("tokens", "weights", "residual", "gate_up", "down")


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer."""

    experts: int
    top_k: int
    expert_size: int
    width: int = 2048
    tokens: int = 16384
    is_whole: bool = True
    """Whether the layer is measured too, and not only its products."""

    @property
    def rows(self) -> int:
        """Routed ones."""
        return self.tokens * self.top_k

    def cost(self) -> dict[str, Cost]:
        """Gate and up, then down; each with the products of two gradients."""
        flops = 2 * self.rows * 3 * self.expert_size * self.width
        return {FORWARD: Cost(flops), TRAINING: Cost(3 * flops)}

    def need(self) -> Need:
        """What the registry is asked for."""
        return Need(widths={"hidden_size": self.width, "expert_size": self.expert_size})


SHAPES = {
    "deepseek_v2": Shape(64, 6, 1408),
    "qwen3": Shape(128, 8, 768),
    "gpt_oss": Shape(32, 4, 2880, width=2880, is_whole=False),
    "tiny": Shape(5, 2, 16, width=24, tokens=38),
}


def subjects(name: str, where: Place) -> Sequence[Subject]:
    """One for each load."""
    return list(_subjects(name, where))


def _subjects(name: str, where: Place) -> Iterator[Subject]:
    shape = SHAPES[name]
    sides, missing = _sides(shape, where)
    library = "torch_grouped_mm_cuda" if where.device.type == "cuda" else "torch_grouped_mm"
    for load in LOADS:
        popularity_E = popularity(shape.experts, load, where.device)
        counts_E = choose(shape, popularity_E, where).flatten().bincount(minlength=shape.experts)
        sizes = {**vars(shape), "load_max_over_mean": float(counts_E.max() / counts_E.float().mean())}
        make = partial(_make, shape, popularity_E, where)
        yield Subject(f"{name} {load}", sizes, make, sides, ("grouped_mm", library), missing)


def _sides(shape: Shape, where: Place) -> tuple[list[Side], dict[Key, str]]:
    """Each grouped product alone, the layer by stages with each, and the layer in one."""
    products, missing = where.split("grouped_mm", shape.need())
    sides = [
        Side(
            *(("grouped_mm", key), partial(_products, function), shape.cost()),
            *(("rows", "inner", "gate_up", "down"), ("grad_inner", "grad_rows")),
        )
        for key, function in products.items()
    ]
    if not shape.is_whole:
        return sides, missing
    names = ("permute", "swiglu", "unpermute", "combine")
    ops = {operation: where.chosen(operation) for operation in names}
    wholes, more = where.split("local_experts", shape.need())
    layers = {("stages", key): partial(_stages, function, ops) for key, function in products.items()}
    layers |= {("local_experts", key): partial(_whole, function) for key, function in wholes.items()}
    sides += [Side(key, call, shape.cost(), LEAVES, ("grad",)) for key, call in layers.items()]
    return sides, missing | more


def popularity(experts: int, load: str, device: torch.device) -> Tensor | None:
    """Share of each expert, or None where they take turns.

    Squares of normal numbers are Gamma(1/2) but for a factor, so their shares are Dirichlet(1/2); the same
    whenever they are drawn.
    """
    if load == "balanced":
        return None
    squares_E = torch.empty(experts).normal_(generator=torch.Generator().manual_seed(5)).square()
    return (squares_E / squares_E.sum()).clamp(min=1e-9).to(device)


def choose(shape: Shape, popularity_E: Tensor | None, where: Place) -> Tensor:
    """int32 ids [T,K], K distinct ones a token: the first arrivals of exponential clocks."""
    if popularity_E is None:
        slots_N = torch.arange(shape.rows, device=where.device)
        return (slots_N % shape.experts).int().view(shape.tokens, shape.top_k)
    clocks_TE = torch.empty(shape.tokens, shape.experts, device=where.device)
    clocks_TE.exponential_(generator=where.draws)
    return (clocks_TE / popularity_E).topk(shape.top_k, largest=False).indices.int()


def _make(shape: Shape, popularity_E: Tensor | None, where: Place) -> Inputs:
    E, D, F, N, T = shape.experts, shape.width, shape.expert_size, shape.rows, shape.tokens
    order = where.chosen("sort_by_expert")(choose(shape, popularity_E, where), E)
    inputs: Inputs = {
        "order": order,
        "gate_up": where.leaf(E, 2 * F, D, std=D**-0.5),
        "down": where.leaf(E, D, F, std=F**-0.5),
        "rows": where.leaf(N, D),
        "inner": where.leaf(N, F),
        "grad_inner": where.normal(N, 2 * F),
        "grad_rows": where.normal(N, D),
    }
    if shape.is_whole:
        weights_TK = where.normal(T, shape.top_k, dtype=torch.float32).softmax(-1).requires_grad_()
        inputs |= {"tokens": where.leaf(T, D), "weights": weights_TK, "residual": where.leaf(T, D)}
        inputs["grad"] = where.normal(T, D)
    return inputs


def _products(grouped_mm: Callable[..., Tensor], inputs: Inputs) -> tuple[Tensor, Tensor]:
    offs_E = inputs["order"].offs_E
    gate_up_N2F = grouped_mm(inputs["rows"], inputs["gate_up"], offs_E)
    return gate_up_N2F, grouped_mm(inputs["inner"], inputs["down"], offs_E)


def _stages(grouped_mm: Callable[..., Tensor], ops: dict[str, Callable[..., Any]], inputs: Inputs) -> Tensor:
    order, weights_TK = inputs["order"], inputs["weights"]
    places = (order.row_slot_N, order.slot_row_N, weights_TK.shape[1])
    gate_up_N2F = grouped_mm(ops["permute"](inputs["tokens"], *places), inputs["gate_up"], order.offs_E)
    rows_ND = grouped_mm(ops["swiglu"](gate_up_N2F), inputs["down"], order.offs_E)
    out_TD: Tensor = ops["combine"](ops["unpermute"](rows_ND, *places), weights_TK, inputs["residual"])
    return out_TD


def _whole(local_experts: Callable[..., Tensor], inputs: Inputs) -> Tensor:
    order, experts = inputs["order"], (inputs["gate_up"], inputs["down"])
    return local_experts(inputs["tokens"], inputs["weights"], inputs["residual"], order, *experts)


CASES = {name: partial(subjects, name) for name in SHAPES}
