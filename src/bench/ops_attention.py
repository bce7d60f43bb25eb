"""Attention of the families' shapes, over whole samples and over packed documents (PERF-6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from src.bench.op import FORWARD, TRAINING, Cost, Side, Subject
from src.bench.place import Place
from src.bench.stopwatch import Inputs
from src.config import KernelsConfig
from src.errors import UserError
from src.kernels.declaration import Need
from src.kernels.registry import Ops
from src.models.layers import attend
from src.models.protocol import Batch

BACKWARD = 3.5
"""Forward and backward over forward: a fused backward has five products, that of the scores again."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one call."""

    heads: int
    groups: int
    """Heads of keys and values."""
    key: int
    value: int
    window: int | None = None
    """Keys that a query sees at most."""
    has_sinks: bool = False
    documents: int = 1
    """Documents of each sample, cut at random places."""
    batch: int = 4
    seq: int = 4096

    def cost(self) -> dict[str, Cost]:
        """Two products over the pairs of query and key that count, 2·(C + U) operations each and head."""
        pairs = sum(seen(end - start, self.window) for start, end in pairwise(self.bounds()))
        flops = int(2 * self.heads * (self.key + self.value) * pairs)
        return {FORWARD: Cost(flops), TRAINING: Cost(int(BACKWARD * flops))}

    def bounds(self) -> list[int]:
        """Where the documents of the batch begin, and the end of the last."""
        draws = torch.Generator().manual_seed(7)
        found = [0]
        for sample in range(self.batch):
            keys = torch.empty(self.seq - 1).uniform_(generator=draws)
            cuts = keys.argsort()[: self.documents - 1] + 1
            found += [sample * self.seq + int(place) for place in (*cuts.sort().values, self.seq)]
        return found

    def need(self) -> Need:
        """What the registry is asked for."""
        features = {
            "unequal_widths": self.key != self.value,
            "gqa": self.heads != self.groups,
            "packed": self.documents > 1,
            "window": self.window is not None,
            "sinks": self.has_sinks,
        }
        widths = {"key": self.key, "value": self.value}
        return Need(frozenset(name for name, is_so in features.items() if is_so), widths)


def seen(length: int, window: int | None) -> float:
    """Pairs of query and key of a causal document: half of its square, as MFU counts; fewer with a window."""
    width = length if window is None else min(window, length)
    return length * width - width**2 / 2


MLA, GQA = Shape(16, 16, 192, 128), Shape(32, 4, 128, 128)
SHAPES = {
    "mla": MLA,
    "mha": Shape(16, 16, 128, 128),
    "gqa": GQA,
    "gpt_oss": Shape(64, 8, 64, 64, has_sinks=True),
    "gpt_oss_window": Shape(64, 8, 64, 64, window=128, has_sinks=True),
    "gpt_oss_plain": Shape(64, 8, 64, 64),
    "mla_packed": replace(MLA, documents=4),
    "gqa_packed": replace(GQA, documents=4),
    "gpt_oss_packed": Shape(64, 8, 64, 64, window=128, has_sinks=True, documents=4),
    "tiny": Shape(4, 2, 24, 16, batch=2, seq=40),
    "tiny_packed": Shape(4, 2, 16, 16, window=9, has_sinks=True, documents=3, batch=2, seq=40),
}


def resized(shape: Shape, tokens: int) -> Shape:
    """The same of so many tokens, in samples as long.

    Raises:
        UserError: that is no number of samples.
    """
    if tokens % shape.seq or not tokens:
        raise UserError(f"--tokens {tokens}: samples have {shape.seq}, so a multiple of that")
    return replace(shape, batch=tokens // shape.seq)


def subjects(name: str, shape: Shape, where: Place) -> Sequence[Subject]:
    """One: every implementation, against the fastest."""
    need = shape.need()
    there, missing = where.split("attention", need)
    auto = where.auto("attention", need)
    leaves = ("q", "k", "v", "sinks") if shape.has_sinks else ("q", "k", "v")
    sides = []
    for key, known in there.items():
        ops = where.ops(KernelsConfig(attention=key), {"attention": need})
        call, is_compiled = where.as_trained(partial(_call, ops, shape), known)
        what = (("attention", key), call, shape.cost(), leaves, ("grad",))
        sides.append(Side(*what, is_auto=key == auto, is_compiled=is_compiled))
    return [Subject(name, vars(shape), partial(_make, shape, where), sides, None, missing)]


def _make(shape: Shape, where: Place) -> Inputs:
    lead = (shape.batch, shape.seq)
    found = {
        "q": where.leaf(*lead, shape.heads, shape.key),
        "k": where.leaf(*lead, shape.groups, shape.key),
        "v": where.leaf(*lead, shape.groups, shape.value),
        "grad": where.normal(*lead, shape.heads, shape.value),
    }
    if shape.has_sinks:
        found["sinks"] = where.leaf(shape.heads)
    return {**found, "batch": batch_of(shape, where.device)}


def batch_of(shape: Shape, device: torch.device) -> Batch:
    """What a layer is told of the documents."""
    bounds = torch.tensor(shape.bounds())
    lengths = bounds.diff()
    documents_N = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    positions_N = torch.arange(documents_N.numel()) - bounds[documents_N]
    documents_BS, positions_BS = (
        x.view(shape.batch, shape.seq).to(device) for x in (documents_N, positions_N)
    )
    if shape.documents == 1:
        return Batch(positions_BS, None, None, None, None)
    return Batch(positions_BS, bounds.int().to(device), documents_BS.int(), None, None)


def _call(ops: Ops, shape: Shape, attention: object, inputs: Inputs) -> Tensor:
    """As a layer asks for it; `attention` is what `ops` has chosen."""
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    return attend(ops, inputs["batch"], q, k, v, shape.key**-0.5, shape.window, inputs.get("sinks"))
