"""A mixture's layer from router to output, over the grouped products alone, and its parts (PERF-5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from src.bench.op import FORWARD, TRAINING, Cost, Side, Subject
from src.bench.op_shapes import LOADS, Shape, choose, popularity
from src.bench.ops_rows import expert_rows, routing
from src.bench.place import Key, Place
from src.bench.stopwatch import Inputs
from src.config import KernelsConfig
from src.kernels.declaration import EAGER, Implementation
from src.kernels.registry import Ops
from src.models.build import build, param_specs
from src.models.decoder_layer import DecoderLayer, MoE
from src.models.dispatch import LocalDispatcher
from src.models.protocol import Batch, Carry, Routing
from src.models.stage import Stage, alone

LAYER = "moe_layer"
CALM, LOUD = 0.002, 4.0
"""Scale of the router's weight where tokens are noise, and by how much its logits prefer what is chosen."""
VARIED = ("local_experts", "grouped_mm")
"""Operations whose implementations the layer is timed with, one other than `auto`'s at a time."""


class Mixture(DecoderLayer):
    """A decoder layer without attention and norms: the tokens are its input and its residual."""

    def attend(self, hidden_TD: Tensor, batch: Batch) -> tuple[Tensor, Routing | None, Carry]:
        """The router alone."""
        assert isinstance(self.mlp, MoE)
        return hidden_TD, self.mlp.gate(hidden_TD, batch), Carry(hidden_TD)


@dataclass(frozen=True)
class Variant:
    """A layer with certain operations; all variants of a set of inputs share their weights."""

    key: Key
    ops: Ops
    is_auto: bool

    def layer(self, shape: Shape) -> Mixture:
        """The family's, its weights without memory."""
        nothing = alone(Stage(range(0), first=False, last=False), range(0))
        with torch.device("meta"):
            model: Any = build(shape.config, nothing, self.ops)
            moe = model.moe(range(shape.experts), self.ops)
            return Mixture(shape.config, nn.Identity(), moe, self.ops)


def resized(shape: Shape, tokens: int) -> Shape:
    """The same of so many tokens."""
    return replace(shape, tokens=tokens)


def subjects(name: str, shape: Shape, where: Place) -> Sequence[Subject]:
    """The layer and its products under both loads, then each part as `auto` takes it."""
    parts = [*routing(shape, where), *expert_rows(shape, where)]
    whole = [part.subject(f"{name} part", where, vars(shape)) for part in parts]
    return [*_layers(name, shape, where), *map(_automatic, whole)]


def _automatic(subject: Subject) -> Subject:
    return replace(subject, sides=[side for side in subject.sides if side.is_auto])


def _layers(name: str, shape: Shape, where: Place) -> Iterator[Subject]:
    found, need = variants(shape, where), shape.needs
    products, missing = where.split("grouped_mm", need["grouped_mm"])
    missing |= where.split("local_experts", need["local_experts"])[1]
    cost = {FORWARD: Cost(shape.flops), TRAINING: Cost(3 * shape.flops)}
    leaves = ("tokens", *weights(found[0].layer(shape)))
    sides = [product(key, known, cost, shape, where) for key, known in products.items()]
    for variant in found:
        what = (variant.key, partial(_run, variant.key), cost, leaves, ("grad",))
        sides.append(Side(*what, is_auto=variant.is_auto, is_compiled=where.compiles))
    library = "torch_grouped_mm_cuda" if where.device.type == "cuda" else "torch_grouped_mm"
    other = ("grouped_mm", library if library in products else EAGER)
    for load in LOADS:
        popularity_E = popularity(shape.experts, load, where.device)
        counts_E = choose(shape, popularity_E, where).flatten().bincount(minlength=shape.experts)
        sizes = {**vars(shape), "load_max_over_mean": float(counts_E.max() / counts_E.float().mean())}
        make = partial(_make, shape, popularity_E, found, where)
        yield Subject(f"{name} {load}", sizes, make, sides, other, missing)


def product(name: str, known: Implementation, cost: Mapping[str, Cost], shape: Shape, where: Place) -> Side:
    """Both grouped products alone, on rows and inner activations of their own."""
    is_auto = name == where.auto("grouped_mm", shape.needs["grouped_mm"])
    call = partial(_products, known.function)
    leaves, grads = ("rows", "inner", "gate_up", "down"), ("grad_inner", "grad_rows")
    return Side(("grouped_mm", name), call, cost, leaves, grads, is_auto=is_auto)


def variants(shape: Shape, where: Place) -> list[Variant]:
    """`auto`, then one operation of `VARIED` at a time by another name; no two run the same."""
    auto = where.ops(needs=shape.needs)
    found = [Variant((LAYER, "auto"), auto, is_auto=True)]
    for operation in VARIED:
        for name in where.split(operation, shape.needs[operation])[0]:
            names: dict[str, Any] = {"local_experts": EAGER, operation: name}  # Fused, there are no products.
            ops = where.ops(replace(KernelsConfig(), **names), shape.needs)
            if all(_names(ops) != _names(other.ops) for other in found):
                found.append(Variant((LAYER, f"{operation}={name}"), ops, is_auto=False))
    return found


def _names(ops: Ops) -> tuple[str, ...]:
    """What is chosen of the operations that a layer runs."""
    varied = VARIED[:1] if ops.fuses_experts else VARIED
    return tuple(ops.choices[operation].name for operation in varied)


def weights(layer: Mixture) -> dict[str, nn.Parameter]:
    """Those of the router and of the experts, by short names."""
    assert isinstance(layer.mlp, MoE)
    parts = {"router": layer.mlp.gate, "experts": layer.mlp.experts}
    return {
        name if prefix == "experts" else f"{prefix}_{name}": parameter
        for prefix, module in parts.items()
        for name, parameter in module.named_parameters()
    }


def _make(shape: Shape, popularity_E: Tensor | None, found: Sequence[Variant], where: Place) -> Inputs:
    E, D, F, N, T = shape.experts, shape.width, shape.expert_size, shape.rows, shape.tokens
    ids_TK = choose(shape, popularity_E, where)
    layers = {variant.key: variant.layer(shape) for variant in found}
    filled = _filled(next(iter(layers.values())), where)
    for layer in layers.values():
        _share(layer, filled)
        if where.compiles:
            layer.compile(fullgraph=True, dynamic=False)
    dispatchers = {variant.key: LocalDispatcher(E, variant.ops) for variant in found}
    return {
        **filled,
        "tokens": telling(shape, ids_TK, where).requires_grad_(),
        "offs": ids_TK.flatten().bincount(minlength=E).cumsum(0, dtype=torch.int32),
        "batch": Batch(torch.zeros(1, T, dtype=torch.int64, device=where.device), *[None] * 4),
        "layers": layers,
        "dispatchers": dispatchers,
        "rows": where.leaf(N, D),
        "inner": where.leaf(N, F),
        "grad_inner": where.normal(N, 2 * F),
        "grad_rows": where.normal(N, D),
        "grad": where.normal(T, D),
    }


def telling(shape: Shape, ids_TK: Tensor, where: Place) -> Tensor:
    """Random tokens [T,D] that the router sends to these experts: their first E columns say so."""
    tokens_TD = where.normal(shape.tokens, shape.width)
    marks_TE = where.normal(shape.tokens, shape.experts, std=0.1) - LOUD / 2
    tokens_TD[:, : shape.experts] = marks_TE.scatter_add(
        1, ids_TK.long(), torch.full_like(ids_TK, LOUD, dtype=marks_TE.dtype)
    )
    return tokens_TD


def _filled(layer: Mixture, where: Place) -> dict[str, nn.Parameter]:
    """Random weights in the dtypes of training; the router's read the first columns of tokens."""
    wide = {p for name, p in layer.named_parameters() if name in _wide(layer)}
    found = {}
    for name, parameter in weights(layer).items():
        std = CALM if name == "router_weight" else parameter.shape[-1] ** -0.5
        dtype = torch.float32 if parameter in wide else where.dtype
        values = where.normal(*parameter.shape, std=std, dtype=dtype)
        if name == "router_weight":
            values.fill_diagonal_(1.0)
        elif name == "router_bias":
            values.mul_(CALM)
        found[name] = nn.Parameter(values)
    return found


def _wide(layer: Mixture) -> set[str]:
    assert isinstance(layer.mlp, MoE)
    return {f"mlp.{name}" for name, spec in param_specs(layer.mlp).items() if spec.wide}


def _share(layer: Mixture, filled: Mapping[str, nn.Parameter]) -> None:
    """Put the weights into a layer."""
    assert isinstance(layer.mlp, MoE)
    for name, parameter in filled.items():
        is_router = name.startswith("router_")
        module = layer.mlp.gate if is_router else layer.mlp.experts
        setattr(module, name.removeprefix("router_"), parameter)


def _products(grouped_mm: Callable[..., Tensor], inputs: Inputs) -> tuple[Tensor, Tensor]:
    gate_up_N2F = grouped_mm(inputs["rows"], inputs["gate_up"], inputs["offs"])
    return gate_up_N2F, grouped_mm(inputs["inner"], inputs["down"], inputs["offs"])


def _run(key: Key, inputs: Inputs) -> Tensor:
    layer, dispatcher = inputs["layers"][key], inputs["dispatchers"][key]
    out: Tensor = layer(inputs["tokens"], inputs["batch"], dispatcher)
    return out
