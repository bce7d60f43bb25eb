"""Samples of packed documents as tensors (PACK-3 to PACK-6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from src.trainer.data.batch import MicroBatch
from src.trainer.data.pack import Plan
from src.trainer.data.tokens import Source

NO_TARGET = -100
"""Label of a position that predicts nothing."""

FILLER = -1
"""Index of a sample that only completes a round of ranks (EVAL-1): pads and nothing else."""


@dataclass(frozen=True)
class Packed:
    """One side of the split, cut into samples of `sequence_length` positions."""

    source: Source
    plan: Plan
    sequence_length: int

    def __len__(self) -> int:
        return len(self.plan)

    def micro_batch(self, samples: Sequence[int]) -> MicroBatch:
        """The samples with these indices, side by side.

        Raises RuntimeError that names artifact, sample and document if one cannot be read (LOAD-2).
        """
        rows = [self._row(sample) for sample in samples]
        is_dense = all(row.is_dense for row in rows)
        has_pads = any(row.pads for row in rows)
        sizes = np.concatenate([row.segments for row in rows])
        target_tokens = sum(int((row.labels != NO_TARGET).sum()) for row in rows)
        return MicroBatch(
            ids_BS=_stack([row.ids for row in rows]),
            labels_BS=_stack([row.labels for row in rows]),
            positions_BS=_stack([row.positions for row in rows]),
            cu_seqlens=None if is_dense else torch.from_numpy(_boundaries(sizes)),
            documents_BS=None if is_dense else torch.from_numpy(_segment_index(sizes, len(rows))),
            real_BS=torch.from_numpy(np.stack([row.real for row in rows])) if has_pads else None,
            target_tokens=target_tokens,
            samples=tuple(samples),
        )

    def _row(self, sample: int) -> Row:
        row = Row(self.sequence_length)
        if sample == FILLER:
            return row.close()
        for document, start, length in self.plan.sample(sample).tolist():
            try:
                ids = self.source.read(document, start, length)
                row.add(ids, self.source.targets(document, start, length))
            except Exception as error:
                place = f"document {document}, tokens {start} to {start + length}"
                raise RuntimeError(f"{self.source.name}: sample {sample}, {place}: {error}") from error
        return row.close()


class Row:
    """One sample while it is filled."""

    def __init__(self, positions: int) -> None:
        self.ids = np.zeros(positions, np.int64)
        self.labels = np.full(positions, NO_TARGET, np.int64)
        self.positions = np.zeros(positions, np.int64)
        self.real = np.zeros(positions, bool)
        self.segments: list[int] = []
        """Lengths of the segments; pads are the last one."""
        self._filled = 0

    def add(self, ids: npt.NDArray[np.int64], targets: npt.NDArray[np.bool_] | None) -> None:
        """Append a piece of a document; the label of a position is the next id of the same piece."""
        place = slice(self._filled, self._filled + len(ids))
        self.ids[place] = ids
        labels = ids[1:] if targets is None else np.where(targets[1:], ids[1:], NO_TARGET)
        self.labels[place][:-1] = labels
        self.positions[place] = np.arange(len(ids))
        self.real[place] = True
        self._filled += len(ids)
        self.segments.append(len(ids))

    def close(self) -> Row:
        """Make the places that are left one last segment of pads."""
        if self.pads:
            self.positions[self._filled :] = np.arange(self.pads)
            self.segments.append(self.pads)
        return self

    @property
    def pads(self) -> int:
        """Places without a token."""
        return len(self.ids) - self._filled

    @property
    def is_dense(self) -> bool:
        """The sample is one document without pads (PACK-6)."""
        return self.pads == 0 and len(self.segments) == 1


def _stack(rows: list[npt.NDArray[np.int64]]) -> torch.Tensor:
    return torch.from_numpy(np.stack(rows))


def _boundaries(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


def _segment_index(sizes: npt.NDArray[np.int64], rows: int) -> npt.NDArray[np.int32]:
    return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes).reshape(rows, -1)
