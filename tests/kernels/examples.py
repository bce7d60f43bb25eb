"""Inputs of every operation, with which each of its implementations is compared with the reference (REG-5).

A new implementation is picked up by what it declares; a new operation wants a function here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from src.kernels.adamw import Adam
from src.kernels.declaration import Need
from src.kernels.fp8 import Quantised
from src.kernels.quantise_weight import quantise_weight as quantised_weight
from src.kernels.sort_by_expert import Order, sort_by_expert


@dataclass(frozen=True)
class Example:
    """One call."""

    name: str
    graded: Sequence[Tensor]
    """Tensors whose gradients count; of none, the operation has no backward or writes in place."""
    call: Callable[..., Any]
    """From an implementation and the tensors, these and the others, to a tensor or several."""
    others: Sequence[Tensor] = ()
    """More tensors; floating ones are given to the reference in fp64, as the graded are."""
    need: Need = field(default_factory=Need)


@dataclass(frozen=True)
class Draw:
    """Random tensors on a device, the same on each: drawn on the CPU and rounded to the dtype."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(7))

    def normal(self, *shape: int, std: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(shape, generator=self.generator).mul_(std)
        return x.to(self.device, dtype or self.dtype)

    def positive(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.normal(*shape, dtype=dtype).abs_().add_(0.1)

    def whole(self, below: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(below, shape, generator=self.generator).to(self.device, dtype)

    def ids(self, tokens: int, experts: int, top_k: int) -> Tensor:
        """int32 [T,K], distinct in each row."""
        order = torch.rand(tokens, experts, generator=self.generator).argsort(1)
        return order[:, :top_k].to(self.device, torch.int32)

    def angles(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines, fp32."""
        angles = self.normal(*shape, dtype=torch.float32)
        return angles.cos(), angles.sin()

    def ends(self, *counts: int) -> Tensor:
        """int32 ends of the experts' rows."""
        return torch.tensor(counts).cumsum(0).to(self.device, torch.int32)


DOCUMENTS = ((0, 0, 0, 0, 0, 1, 2, 2, 2, 2, 2), (3, 4, 4, 4, 4, 4, 4, 4, 4, 5, 5))
"""Of two samples of 11 positions: one of a single token, none over the end of a sample."""
HEADS = {
    "mha": (4, 4, 16, 16),
    "gqa": (4, 2, 16, 16),
    "unequal": (4, 4, 24, 8),
    "both": (6, 2, 24, 16),
    "gqa of 64": (4, 2, 64, 64),
    "mla": (2, 2, 192, 128),
}


def attention(draw: Draw) -> Iterator[Example]:
    for heads, packed, windowed, sinks in product(HEADS, (False, True), (False, True), (False, True)):
        H, G, C, U = HEADS[heads]
        window = (99 if heads == "mha" else 3) if windowed else None  # One that is wider than the samples.
        options: dict[str, Any] = {"window": window} if window else {}
        documents = torch.tensor(DOCUMENTS, dtype=torch.int32)
        if packed:
            starts = torch.cat((torch.zeros(1), documents.flatten().bincount().cumsum(0)))
            options["cu_seqlens"] = starts.to(draw.device, torch.int32)
        places = documents.to(draw.device) if packed else None
        has = ({"gqa"} if H != G else set()) | ({"unequal_widths"} if C != U else set())
        has |= {"packed"} if packed else set()
        has |= ({"window"} if window else set()) | ({"sinks"} if sinks else set())
        graded = [draw.normal(2, 11, H, C), draw.normal(2, 11, G, C), draw.normal(2, 11, G, U)]
        more = [draw.normal(H)] if sinks else []

        def call(
            function: Any, q: Tensor, k: Tensor, v: Tensor, *a: Tensor,
            places: Tensor | None = places, options: dict[str, Any] = options,
        ) -> Any:  # fmt: skip
            return function(q, k, v, 0.3, places, **options, **({"sinks_H": a[0]} if a else {}))

        need = Need(frozenset(has), {"key": C, "value": U})
        yield Example(" ".join([heads, *sorted(has)]), [*graded, *more], call, need=need)


LOADS = {"uneven": (3, 0, 6), "all to one": (0, 9, 0), "tail": (2, 1, 4), "no rows": (0, 0, 0)}
WIDTHS = {"odd": (5, 7), "whole": (16, 24)}


def grouped_mm(draw: Draw) -> Iterator[Example]:
    for load, width in product(LOADS, WIDTHS):
        rows, (D, M) = 0 if load == "no rows" else 9, WIDTHS[width]
        yield Example(
            f"{load}, {width}",
            [draw.normal(rows, D), draw.normal(3, M, D)],
            lambda function, x, w, offs: function(x, w, offs),
            [draw.ends(*LOADS[load])],
            Need(widths={"hidden_size": D, "expert_size": M}),
        )


def expert_bias(draw: Draw) -> Iterator[Example]:
    for load, counts in (LOADS | {"several tiles": (70, 0, 3, 0, 60, 1, 0)}).items():
        experts, rows = len(counts), max(9, sum(counts) + 2) if sum(counts) else 0
        yield Example(
            load,
            [draw.normal(rows, 7), draw.normal(experts, 7)],
            lambda function, rows, bias, offs: function(rows, bias, offs),
            [draw.ends(*counts)],
        )


RULES: Mapping[str, dict[str, Any]] = {
    "softmax": {"groups": 1, "groups_kept": 1, "renormalise": False, "scale": 1.0},
    "renormalised": {"groups": 1, "groups_kept": 1, "renormalise": True, "scale": 2.5},
    "groups": {"groups": 5, "groups_kept": 2, "renormalise": True, "scale": 1.0},
    "chosen": {"groups": 1, "groups_kept": 1, "renormalise": False, "scale": 1.0}
    | {"scoring": "softmax_of_chosen"},
}


def route(draw: Draw) -> Iterator[Example]:
    bias = draw.normal(15, std=0.1, dtype=torch.float32)
    for rule, tokens, biased in (*product(RULES, (7, 0), (False,)), *product(RULES, (200,), (True,))):
        yield Example(
            f"{rule}, {tokens} tokens{', biased' if biased else ''}",
            [draw.normal(tokens, 15, dtype=torch.float32)],
            lambda function, logits, bias=None, rule=rule: function(logits, 3, bias_E=bias, **RULES[rule]),
            [bias] if biased else [],
        )
    for rule in ("renormalised", "chosen"):
        yield Example(
            f"{rule}, by ids that are given",
            [draw.normal(9, 15, dtype=torch.float32)],
            lambda function, logits, ids, rule=rule: function(logits, 3, ids_TK=ids, **RULES[rule])[1:],
            [draw.ids(9, 15, 3)],
        )
    yield Example(
        "weights alone",
        [draw.normal(9, 64, dtype=torch.float32)],
        lambda function, logits: function(logits, 8, **RULES["renormalised"]).weights_TK,
    )


def sort_example(draw: Draw) -> Iterator[Example]:
    for tokens, experts in ((7, 5), (0, 5), (700, 64)):
        yield Example(
            f"{tokens} tokens, {experts} experts",
            [],
            lambda function, ids, experts=experts: function(ids, experts),
            [draw.ids(tokens, experts, 3)],
        )


def _order(draw: Draw, tokens: int, experts: int, top_k: int) -> Order:
    return sort_by_expert(draw.ids(tokens, experts, top_k), experts)


def permute(draw: Draw) -> Iterator[Example]:
    for tokens, width in ((7, 5), (3, 2100), (0, 5)):
        order = _order(draw, tokens, 5, 3)
        yield Example(
            f"{tokens} tokens",
            [draw.normal(tokens, width)],
            lambda function, x, *order: function(x, *order),
            [order.row_slot_N // 3, order.slot_row_N.view(tokens, 3)],
        )
    slot_row = torch.tensor([[2, 5, 4], [5, 5, 5], [0, 3, 1]], device=draw.device)
    yield Example(
        "slots without a row",
        [draw.normal(3, 7)],
        lambda function, x, *order: function(x, *order),
        [torch.tensor([2, 2, 0, 2, 0], device=draw.device), slot_row],
    )


def combine(draw: Draw) -> Iterator[Example]:
    for tokens, top_k, width in ((7, 3, 5), (2, 1, 2100), (2, 12, 2100), (0, 3, 5)):
        slot_row = _order(draw, tokens, 15, top_k).slot_row_N.view(tokens, top_k)
        weights = draw.positive(tokens, top_k, dtype=torch.float32)
        yield Example(
            f"{tokens} tokens, {top_k} of each",
            [draw.normal(tokens * top_k, width), weights, draw.normal(tokens, width)],
            lambda function, y, weights, residual, slot_row: function(y, slot_row, weights, residual),
            [slot_row],
        )


def local_experts(draw: Draw) -> Iterator[Example]:
    order = _order(draw, 11, 4, 2)
    for width, (D, F) in {"odd": (6, 5), "whole": (128, 64)}.items():
        weights = draw.positive(11, 2, dtype=torch.float32)
        experts = [draw.normal(4, 2 * F, D, std=D**-0.5), draw.normal(4, D, F, std=F**-0.5)]
        yield Example(
            width,
            [draw.normal(11, D), weights, draw.normal(11, D), *experts],
            lambda function, x, w, residual, up, down, *order: function(
                x, w, residual, Order(*order), up, down
            ),
            order,
            Need(widths={"hidden_size": D, "expert_size": F}),
        )


def swiglu(draw: Draw) -> Iterator[Example]:
    for rows, width in ((5, 37), (0, 8), (2, 1100)):
        yield Example(f"{rows}x{width}", [draw.normal(rows, 2 * width)], lambda function, x: function(x))
    yield Example(
        "clamped",
        [draw.normal(5, 74, std=2.0)],
        lambda function, x: function(x, limit=0.7, alpha=1.702),
        need=Need(frozenset({"clamped"})),
    )


def rms_norm(draw: Draw) -> Iterator[Example]:
    for rows, width in ((5, 37), (0, 37), (300, 3)):
        x, w = draw.normal(rows, width), draw.positive(width)
        yield Example(f"{rows} rows", [x, w], lambda function, x, w: function(x, w, 1e-3)[0])
        yield Example(
            f"{rows} rows onto others",
            [x, w, draw.normal(rows, width)],
            lambda function, x, w, residual: function(x, w, 1e-3, residual),
        )
    yield Example(
        "part of a row",
        [draw.normal(2, 3, 9), draw.positive(5)],
        lambda function, x, w: function(x[..., 2:7], w, 1e-3)[0],
    )


def rope(draw: Draw) -> Iterator[Example]:
    for interleaved in (True, False):
        yield Example(
            "neighbours" if interleaved else "halves",
            [draw.normal(2, 5, 3, 6)],
            lambda function, *x, interleaved=interleaved: function(*x, interleaved=interleaved),
            draw.angles(2, 5, 3),
        )


def rotary_heads(draw: Draw) -> Iterator[Example]:
    for tokens, normed in ((19, True), (3, False), (0, True)):
        gains = [draw.positive(10), draw.positive(10)] if normed else []

        def call(function: Any, q: Tensor, k: Tensor, *rest: Tensor) -> Any:
            *gains, cos, sin = rest
            return function(q, k, cos, sin, *((tuple(gains), 1e-5) if gains else ()))

        graded = [draw.normal(1, tokens, 3, 10), draw.normal(1, tokens, 1, 10), *gains]
        name = f"{tokens} tokens, {'normed' if normed else 'plain'}"
        yield Example(name, graded, call, draw.angles(1, tokens, 5))


def latent_heads(draw: Draw) -> Iterator[Example]:
    for H, nope, rotated, value in ((3, 5, 6, 7), (4, 8, 4, 8)):
        graded = [draw.normal(2, 5, H, nope + rotated), draw.normal(2, 5, H, nope + value)]
        yield Example(
            f"{H} heads",
            [*graded, draw.normal(2, 5, rotated)],
            lambda function, *tensors: function(*tensors),
            draw.angles(2, 5, rotated // 2),
        )


def router_linear(draw: Draw) -> Iterator[Example]:
    yield Example(
        "fp32 weight",
        [draw.normal(9, 40), draw.normal(5, 40, dtype=torch.float32)],
        lambda function, x, w: function(x, w),
    )


def linear(draw: Draw) -> Iterator[Example]:
    for bias in (True, False):
        graded = [draw.normal(2, 9, 24), draw.normal(16, 24), *([draw.normal(16)] if bias else [])]
        yield Example("bias" if bias else "plain", graded, lambda function, *tensors: function(*tensors))


def linear_cross_entropy(draw: Draw) -> Iterator[Example]:
    for rows, ids in ((9, 33), (0, 8)):
        labels = draw.whole(ids, rows)
        labels[::3] = -100
        yield Example(
            f"{rows} rows",
            [draw.normal(rows, 8), draw.normal(ids, 8)],
            lambda function, h, w, labels, scale: function(h, w, labels, scale),
            [labels, torch.tensor(0.25, device=draw.device)],
        )


def accumulate(draw: Draw) -> Iterator[Example]:
    total = draw.normal(5000, dtype=torch.float32)
    yield Example(
        "onto a sum",
        [],
        lambda function, total, part: function(total.clone(), part, total.dtype),
        [total, draw.normal(5000)],
    )
    yield Example(
        "the first",
        [],
        lambda function, part, like: function(None, part, like.dtype),
        [draw.normal(5000), total[:0]],
    )


def adamw(draw: Draw) -> Iterator[Example]:
    for clip, skip, follows in ((0.5, 0.0, True), (None, 0.0, False), (0.25, 1.0, False)):
        numbers = [torch.tensor(x, device=draw.device) for x in (3.0, clip or 1.0, skip)]

        def call(
            function: Any, p: Tensor, g: Tensor, m: Tensor, v: Tensor,
            numbers: list[Tensor] = numbers, clipped: bool = clip is not None, follows: bool = follows,
        ) -> Any:  # fmt: skip
            step, clip, skip = numbers
            adam = Adam(0.01, (0.9, 0.999), 1e-8, step, clip if clipped else None, skip)
            written = [p.clone(), m.clone(), v.clone(), *([torch.zeros_like(g)] if follows else [])]
            function(written[0], g.clone(), *written[1:3], written[3] if follows else None, 0.3, adam)
            return written

        fp32 = {"dtype": torch.float32}
        tensors = [draw.normal(2500, **fp32), draw.normal(2500), draw.normal(2500, **fp32)]
        yield Example(f"clip {clip}, skip {skip}", [], call, [*tensors, draw.positive(2500, **fp32)])


def grad_norm(draw: Draw) -> Iterator[Example]:
    def call(function: Any, *tensors: Tensor) -> Any:
        return function(tensors, torch.promote_types(tensors[0].dtype, torch.float32))

    yield Example("tensors of three sizes", [], call, [draw.normal(5), draw.normal(3, 7), draw.normal(70000)])


def linear_fp8(draw: Draw) -> Iterator[Example]:
    shapes = ((3, 7), (5, 7)), ((3, 7), (32, 48)), ((16,), (48, 32)), ((0,), (32, 48))
    for by_rows, (rows, (out, into)) in product((False, True), shapes):
        weight = draw.normal(out, into)
        yield Example(
            f"{rows} of {into} to {out}, {'a scale a row' if by_rows else 'one scale'}",
            [draw.normal(*rows, into), weight, draw.normal(out)],
            lambda function, x, w, b, *lent: function(x, w, Quantised(*lent), b),
            quantised_weight(weight, by_rows),
            Need(widths={"in": into, "out": out}),
        )


def grouped_mm_fp8(draw: Draw) -> Iterator[Example]:
    for load, width in product(LOADS, ("odd", "stacked")):
        rows, (D, M) = 0 if load == "no rows" else 9, (WIDTHS | {"stacked": (48, 32)})[width]
        stack = draw.normal(3, M, D)
        yield Example(
            f"{load}, {width}",
            [draw.normal(rows, D), stack],
            lambda function, x, w, offs, *lent: function(x, w, Quantised(*lent), offs),
            [draw.ends(*LOADS[load]), *quantised_weight(stack, by_rows=True)],
            Need(widths={"hidden_size": D, "expert_size": M}),
        )


def quantise_weight(draw: Draw) -> Iterator[Example]:
    """Numbers that e4m3 has, with a largest one in each row and column whose scale is a power of two: the
    interpreter rounds wrongly where rounding carries."""
    for by_rows, shape in product((False, True), ((70, 33), (3, 48, 80))):
        exact = draw.normal(*shape).float().to(torch.float8_e4m3fn).float().clamp(-13, 13)
        M, D = shape[-2:]
        for index in range(max(M, D)):
            exact[..., index % M, index % D] = 14.0

        def call(function: Any, weight: Tensor, by_rows: bool = by_rows) -> Any:
            new = function(weight, by_rows)
            again = function(weight, by_rows, Quantised(*(torch.zeros_like(x) for x in new)))
            return (*new, *again)

        yield Example(f"{shape}, {by_rows}", [], call, [exact.to(draw.dtype)])


EXAMPLES: Mapping[str, Callable[[Draw], Iterator[Example]]] = {
    "attention": attention,
    "grouped_mm": grouped_mm,
    "expert_bias": expert_bias,
    "route": route,
    "sort_by_expert": sort_example,
    "permute": permute,
    "combine": combine,
    "local_experts": local_experts,
    "swiglu": swiglu,
    "rms_norm": rms_norm,
    "rope": rope,
    "rotary_heads": rotary_heads,
    "latent_heads": latent_heads,
    "router_linear": router_linear,
    "linear": linear,
    "linear_fp8": linear_fp8,
    "grouped_mm_fp8": grouped_mm_fp8,
    "quantise_weight": quantise_weight,
    "linear_cross_entropy": linear_cross_entropy,
    "accumulate": accumulate,
    "grad_norm": grad_norm,
    "adamw": adamw,
}
"""Operation → its examples."""


def examples(operation: str, device: torch.device, dtype: torch.dtype) -> list[Example]:
    """Of an operation, with tensors of that dtype where a model has its compute dtype."""
    return list(EXAMPLES[operation](Draw(device, dtype)))
