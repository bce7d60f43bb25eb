"""How documents fill samples of `sequence_length` positions (PACK-1, PACK-2, PACK-3)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from src.trainer.data.tokenizer import Ids

Pieces = npt.NDArray[np.int64]
"""Document, first token, tokens of each piece [P, 3]."""


@dataclass(frozen=True)
class Plan:
    """Which pieces of which documents each sample holds."""

    pieces: Pieces
    """Document, first token, tokens of each piece [P, 3], sample after sample."""
    starts: Ids
    """Index of each sample's first piece, then P [N + 1]."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def sample(self, index: int) -> Pieces:
        """The pieces of one sample, in order."""
        return self.pieces[self.starts[index] : self.starts[index + 1]]

    @property
    def tokens(self) -> int:
        """Positions of all samples that are not pads."""
        return int(self.pieces[:, 2].sum())

    def save(self, directory: Path, side: str) -> None:
        """Write two files."""
        np.save(directory / f"{side}.pieces.npy", self.pieces)
        np.save(directory / f"{side}.samples.npy", self.starts)

    @classmethod
    def load(cls, directory: Path, side: str) -> Self:
        """Memory-map what `save` wrote."""
        files = (directory / f"{side}.{name}.npy" for name in ("pieces", "samples"))
        return cls(*(np.load(file, mmap_mode="r") for file in files))


def make_plan(lengths: Ids, sequence_length: int, packing: str) -> Plan:
    """Pack documents of `lengths` tokens; every pair of neighbours of a document is in exactly one piece.

    Args:
        lengths: tokens of each document, separators included [documents].
        sequence_length: positions S of a sample, at least 2.
        packing: `best_fit`, `contiguous` or `none`.
    """
    assert sequence_length >= 2
    if packing == "contiguous":
        return _contiguous(lengths, sequence_length)
    pieces = cut(lengths, sequence_length)
    if packing == "none":
        return Plan(pieces, np.arange(len(pieces) + 1))
    return _best_fit(pieces, sequence_length)


def cut(lengths: Ids, sequence_length: int) -> Pieces:
    """Pieces of at most S tokens in document order, each beginning with the last token of the one before.

    A document of n tokens has n - 1 pairs; a full piece holds S - 1 of them, the last one the rest. So a
    1-token document gives no piece, and no piece has 1 token.
    """
    pairs = sequence_length - 1
    counts = -(-np.maximum(lengths - 1, 0) // pairs)
    documents = np.repeat(np.arange(len(lengths)), counts)
    first_piece = np.cumsum(counts) - counts
    offsets = (np.arange(len(documents)) - first_piece[documents]) * pairs
    sizes = np.minimum(lengths[documents] - offsets, sequence_length)
    return np.stack([documents, offsets, sizes], axis=1).astype(np.int64)


def _best_fit(pieces: Pieces, sequence_length: int) -> Plan:
    """By decreasing length, document, offset; each into the fullest sample that holds it, then the oldest."""
    pieces = pieces[np.lexsort((pieces[:, 1], pieces[:, 0], -pieces[:, 2]))]
    samples = np.fromiter(_fill(pieces[:, 2].tolist(), sequence_length), np.int64, len(pieces))
    order = np.argsort(samples, kind="stable")
    counts = np.bincount(samples) if len(samples) else samples
    return Plan(pieces[order], np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))


def _fill(lengths: list[int], room: int) -> Iterator[int]:
    """The sample of each piece, in O(log) each: samples by free room in heaps, non-empty heaps as bits."""
    by_room: list[list[int]] = [[] for _ in range(room + 1)]
    nonempty, samples = 0, 0
    for length in lengths:
        holding = nonempty >> length
        if holding:
            free = length + (holding & -holding).bit_length() - 1
            sample = heapq.heappop(by_room[free])
            nonempty &= ~(1 << free) if not by_room[free] else -1
        else:
            free, sample, samples = room, samples, samples + 1
        heapq.heappush(by_room[free - length], sample)
        nonempty |= 1 << (free - length)
        yield sample


def _contiguous(lengths: Ids, sequence_length: int) -> Plan:
    """The documents in order, cut where a sample is full; a last place that holds no pair stays a pad."""
    pieces: list[tuple[int, int, int]] = []
    starts, room = [0], sequence_length
    for document, length in enumerate(lengths.tolist()):
        offset = 0
        while length - offset >= 2:
            if room < 2:
                starts.append(len(pieces))
                room = sequence_length
            size = min(room, length - offset)
            pieces.append((document, offset, size))
            room -= size
            offset += size - 1
    if pieces:
        starts.append(len(pieces))
    return Plan(np.array(pieces, np.int64).reshape(-1, 3), np.array(starts, np.int64))
