"""Operations that memory bounds: those of a mixture's rows, rotations of heads, passes of the loss (PERF-9).

Bytes are what has to be read and written once: inputs, outputs, upstream gradients and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from src.bench.op import TRAINING, Cost, Side, Subject
from src.bench.op_shapes import SHAPES as LAYERS
from src.bench.op_shapes import Shape
from src.bench.ops_rows import WIDE, Operation, expert_rows, norm, routing
from src.bench.place import Place
from src.bench.stopwatch import Inputs
from src.kernels.chunk_rows import FUSED_ROWS
from src.kernels.linear_cross_entropy import fused_losses


@dataclass(frozen=True)
class Heads:
    """Those of attention, of grouped queries or latent ones with a rotated part; and the vocabulary."""

    layer: Shape
    queries: int
    groups: int
    key: int
    vocabulary: int
    is_normed: bool = False
    value: int = 0
    rotated: int = 0
    """Width of the rotated part of a latent key; 0 for grouped queries, where all of it is."""


SHAPES = {
    "deepseek_v2": Heads(LAYERS["deepseek_v2"], 16, 16, 192, 102400, value=128, rotated=64),
    "qwen3": Heads(LAYERS["qwen3"], 32, 4, 128, 151936, is_normed=True),
    "gpt_oss": Heads(LAYERS["gpt_oss"], 64, 8, 64, 201088),
    "tiny": Heads(LAYERS["tiny"], 4, 2, 12, 29, is_normed=True),
}


def resized(heads: Heads, tokens: int) -> Heads:
    """The same of so many tokens."""
    return replace(heads, layer=replace(heads.layer, tokens=tokens))


def subjects(name: str, heads: Heads, where: Place) -> Sequence[Subject]:
    """Every operation at the shapes of one model."""
    shape = heads.layer
    of_layer = [norm(shape, where), *expert_rows(shape, where), *routing(shape, where)]
    of_heads = [latent(heads, where), rotation(heads, where)] if heads.rotated else [rotary(heads, where)]
    sizes = {"tokens": shape.tokens, **{k: v for k, v in vars(heads).items() if k != "layer"}}
    return [
        *(operation.subject(name, where, vars(shape)) for operation in of_layer),
        *(operation.subject(name, where, sizes) for operation in of_heads),
        loss_passes(name, heads, where),
    ]


def rotary(heads: Heads, where: Place) -> Operation:
    """Queries and keys in and out; back their gradients, and where they are normed themselves once more."""
    T, C = heads.layer.tokens, heads.key
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


def latent(heads: Heads, where: Place) -> Operation:
    """Projections in, queries, keys and values out; back the gradients of these in, of those out."""
    T, H, R = heads.layer.tokens, heads.queries, heads.rotated
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


def rotation(heads: Heads, where: Place) -> Operation:
    """The rotated part of latent queries alone, as ranks that share a sequence turn it."""
    T, H, R = heads.layer.tokens, heads.queries, heads.rotated
    moved = 2 * T * H * R * where.dtype.itemsize + T * R * WIDE

    def make() -> Inputs:
        return {"x": where.leaf(1, T, H, R), "grad": where.normal(1, T, H, R), **_angles(T, R // 2, where)}

    def call(function: Callable[..., Any], inputs: Inputs) -> Any:
        return function(inputs["x"], inputs["cos"], inputs["sin"], interleaved=True)

    return Operation("rope", call, make, moved, moved, ("x",))


def _angles(tokens: int, pairs: int, where: Place) -> Inputs:
    angles_BSR = where.normal(1, tokens, pairs, dtype=torch.float32)
    return {"cos": angles_BSR.cos(), "sin": angles_BSR.sin()}


def loss_passes(name: str, heads: Heads, where: Place) -> Subject:
    """From the logits of a chunk of tokens to their losses and gradient: read twice and written once."""
    rows, V = min(FUSED_ROWS, heads.layer.tokens), heads.vocabulary
    cost = {TRAINING: Cost(bytes=3 * rows * V * where.dtype.itemsize)}
    is_fused = "triton" in where.split("linear_cross_entropy")[0]
    sides = [Side(("loss_passes", "torch"), _loss, cost, training=_loss_gradient, is_auto=not is_fused)]
    if is_fused:
        ours = Side(("loss_passes", "triton"), _fused, cost, training=_fused, reset=_reset, is_auto=True)
        sides.append(ours)
    sizes = {"rows": rows, "vocabulary": V}
    return Subject(name, sizes, partial(_logits, rows, V, where), sides, ("loss_passes", "torch"))


def _logits(rows: int, vocabulary: int, where: Place) -> Inputs:
    logits_CV = where.leaf(rows, vocabulary)
    return {
        "logits": logits_CV,
        "written": torch.empty_like(logits_CV, requires_grad=False),
        "labels": torch.empty(rows, dtype=torch.int64, device=where.device).random_(
            vocabulary, generator=where.draws
        ),
        "losses": torch.empty(rows, dtype=torch.float32, device=where.device),
        "scale": torch.tensor(1 / rows, device=where.device),
    }


def _loss(inputs: Inputs) -> Any:
    losses_C = F.cross_entropy(inputs["logits"].float(), inputs["labels"], reduction="none")
    return losses_C.sum() * inputs["scale"]


def _loss_gradient(inputs: Inputs) -> Any:
    return torch.autograd.grad(_loss(inputs), inputs["logits"])


def _fused(inputs: Inputs) -> None:
    fused_losses(inputs["written"], inputs["labels"], inputs["scale"], inputs["losses"], grad=True)


def _reset(inputs: Inputs) -> None:
    """The kernel has put the gradient in the place of the logits."""
    inputs["written"].copy_(inputs["logits"].detach())
