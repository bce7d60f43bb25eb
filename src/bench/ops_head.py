"""Head and loss over the three products that they cannot do without (PERF-7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from src.bench.op import FORWARD, TRAINING, Cost, Side, Subject
from src.bench.place import Place
from src.bench.stopwatch import Inputs

PRODUCTS = ("products", "mm")


@dataclass(frozen=True)
class Shape:
    """Sizes of one call."""

    vocabulary: int
    tokens: int = 16384
    width: int = 2048

    def cost(self) -> dict[str, Cost]:
        """One product forward, three with the gradients of input and weight."""
        flops = 2 * self.tokens * self.vocabulary * self.width
        return {FORWARD: Cost(flops), TRAINING: Cost(3 * flops)}


SHAPES = {"deepseek_v2": Shape(102400), "qwen3": Shape(151936), "tiny": Shape(65, tokens=48, width=24)}


def resized(shape: Shape, tokens: int) -> Shape:
    """The same of so many tokens."""
    return replace(shape, tokens=tokens)


def subjects(name: str, shape: Shape, where: Place) -> Sequence[Subject]:
    """One: every implementation, against the bare products of whole matrices."""
    operation = "linear_cross_entropy"
    there, missing = where.split(operation)
    auto = where.auto(operation)
    sides = [
        Side(
            *((operation, key), partial(_call, known.function), shape.cost(), ("h", "w"), ("grad",)),
            is_auto=key == auto,
        )
        for key, known in there.items()
    ]
    sides.append(Side(PRODUCTS, _logits, shape.cost(), training=_products))
    return [Subject(name, vars(shape), partial(_make, shape, where), sides, PRODUCTS, missing)]


def _make(shape: Shape, where: Place) -> Inputs:
    labels = torch.empty(shape.tokens, device=where.device, dtype=torch.int64)
    labels.random_(shape.vocabulary, generator=where.draws)
    return {
        "h": where.leaf(shape.tokens, shape.width),
        "w": where.leaf(shape.vocabulary, shape.width, std=shape.width**-0.5),
        "labels": labels,
        "scale": torch.tensor(1 / shape.tokens, device=where.device),
        "grad": torch.ones((), device=where.device),
    }


def _call(function: Callable[..., Any], inputs: Inputs) -> Tensor:
    loss: Tensor = function(inputs["h"], inputs["w"], inputs["labels"], inputs["scale"])
    return loss


def _logits(inputs: Inputs) -> Tensor:
    return torch.mm(inputs["h"], inputs["w"].T)


@torch.no_grad()
def _products(inputs: Inputs) -> tuple[Tensor, Tensor]:
    h_TD, w_VD = inputs["h"], inputs["w"]
    logits_TV = _logits(inputs)
    return torch.mm(logits_TV, w_VD), torch.mm(logits_TV.T, h_TD)
