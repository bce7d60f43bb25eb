"""Global batches made by hand, without the loader: dense, and packed with unequal label counts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from src.trainer.data.batch import MicroBatch, StepBatch

VOCABULARY = 97
LENGTH = 13
SAMPLES = 24
"""Global batch: 24 samples in micro-batches of 2 are 12, 6 or 3 micro-batches on 1, 2 or 4 data ranks."""
BLOCK = 2

PACKED = {
    LENGTH: ((13,), (4, 9), (2, 2, 3), (5, 1, 7), (13,), (6, 4), (3, 3, 3, 4)),
    12: ((12,), (4, 8), (2, 2, 3), (5, 1, 6), (12,), (6, 4), (3, 3, 3, 3)),
}
"""Length of a sample → document lengths of the packed samples, in turn; what is missing is padding. Twelve
positions are blocks of three on two context-parallel ranks."""
WITHOUT_LABELS = (4, 5)
"""Samples that have no label at all: one whole micro-batch, and the only one of a rank at some point."""


@dataclass(frozen=True)
class Sample:
    """One sample: document lengths, the last one padding if `padded`, and ids and labels of its positions."""

    lengths: tuple[int, ...]
    padded: bool
    ids_S: Tensor
    labels_S: Tensor


def samples(kind: str, step: int) -> list[Sample]:
    """The global batch of a step: `dense` or `packed`, with the length behind it if that is another.

    Lengths of documents that nobody listed are drawn.
    """
    packed, size = kind.startswith("packed"), length_of(kind)
    generator = torch.Generator().manual_seed(7000 + step + (100 if packed else 0))
    return [_sample(packed, size, index, generator) for index in range(SAMPLES)]


def _drawn(size: int, generator: torch.Generator) -> tuple[int, ...]:
    """Documents one behind the other; the last may leave room for padding."""
    lengths: tuple[int, ...] = ()
    while sum(lengths) < size - 2 and len(lengths) < 5:
        most = size - sum(lengths)
        lengths += (int(torch.randint(1, most + 1, (), generator=generator)),)
    return lengths


def length_of(kind: str) -> int:
    """Positions of a sample."""
    return int(kind.removeprefix("dense").removeprefix("packed") or LENGTH)


def _sample(packed: bool, size: int, index: int, generator: torch.Generator) -> Sample:
    lengths = (size,)
    if packed:
        lengths = PACKED[size][index % len(PACKED[size])] if size in PACKED else _drawn(size, generator)
    ids_S = torch.randint(1, VOCABULARY, (size,), generator=generator)
    labels_S = torch.full((size,), -100)
    start = 0
    for length in lengths:
        labels_S[start : start + length - 1] = ids_S[start + 1 : start + length]
        start += length
    if packed and index in WITHOUT_LABELS:
        labels_S[:] = -100
    padded = start < size
    if padded:
        ids_S[start:] = 0
        lengths = (*lengths, size - start)
    return Sample(lengths, padded, ids_S, labels_S)


def micro_batch(block: list[Sample]) -> MicroBatch:
    """The record of some samples; the dense one carries no document boundaries."""
    ids_BS, labels_BS = torch.stack([s.ids_S for s in block]), torch.stack([s.labels_S for s in block])
    lengths = torch.tensor([length for s in block for length in s.lengths])
    positions = torch.cat([torch.arange(int(n)) for n in lengths]).view_as(ids_BS)
    packed = any(len(s.lengths) > 1 for s in block)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(torch.int32).view_as(ids_BS)
    cu_seqlens = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(torch.int32)
    real_BS = torch.ones_like(ids_BS, dtype=torch.bool)
    for row, sample in enumerate(block):
        if sample.padded:
            real_BS[row, -sample.lengths[-1] :] = False
    return MicroBatch(
        ids_BS=ids_BS,
        labels_BS=labels_BS,
        positions_BS=positions,
        cu_seqlens=cu_seqlens if packed else None,
        documents_BS=documents if packed else None,
        real_BS=None if bool(real_BS.all()) else real_BS,
        target_tokens=int((labels_BS != -100).sum()),
        samples=tuple(range(len(block))),
    )


def blocks(kind: str, step: int, size: int = BLOCK) -> list[MicroBatch]:
    """The global batch as micro-batches of `size` samples, in the order of the slots."""
    rows = samples(kind, step)
    starts = range(0, SAMPLES, size)
    return [replace(micro_batch(rows[i : i + size]), first=step * SAMPLES + i) for i in starts]


def step_batch(kind: str, step: int, coordinate: int, coordinates: int, size: int = BLOCK) -> StepBatch:
    """What one data coordinate gets: every `coordinates`-th block (ORDER-3)."""
    return StepBatch(tuple(blocks(kind, step, size)[coordinate::coordinates]), epoch=0)
