"""The loss of every token of every held-out document, in document order (EVAL-6).

A document that packing cut over several samples is put together again. Each piece is a sequence of its own
here, as it is in a packed sample: it begins at position 0 and sees nothing before itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from src.kernels.dtypes import widen
from src.trainer.backends.base import Backend
from src.trainer.data.corpus import Data
from src.trainer.data.pack import Pieces
from src.trainer.data.packed import NO_TARGET, Row


@dataclass
class DocumentLoss:
    """What a model makes of one document."""

    document: int
    """Its number on the held-out side of the artifact."""
    token_losses: list[float] = field(default_factory=list)
    """Cross entropy of each target token in nats, in document order; the first token is none."""

    @property
    def nats(self) -> float:
        """Sum over its tokens."""
        return float(sum(self.token_losses))

    def line(self) -> dict[str, Any]:
        """As an object of `documents.jsonl`; a document without a target has no loss."""
        tokens = len(self.token_losses)
        loss = self.nats / tokens if tokens else None
        return {
            "document": self.document,
            "tokens": tokens,
            "loss": loss,
            "token_losses": self.token_losses,
        }


def document_losses(data: Data, backend: Backend, size: int) -> Iterator[DocumentLoss]:
    """Each held-out document once, in order of their numbers; `size` pieces a forward."""
    pieces = data.heldout.plan.pieces
    pieces = pieces[np.lexsort((pieces[:, 1], pieces[:, 0]))]
    current, documents = DocumentLoss(0), len(data.heldout.source.lengths)
    for document, losses in _piece_losses(data, backend, pieces, size):
        while current.document < document:
            yield current
            current = DocumentLoss(current.document + 1)
        current.token_losses += losses
    while current.document < documents:
        yield current
        current = DocumentLoss(current.document + 1)


def _piece_losses(
    data: Data, backend: Backend, pieces: Pieces, size: int
) -> Iterator[tuple[int, list[float]]]:
    """Document and losses of each piece, in the order given."""
    for first in range(0, len(pieces), size):
        chosen = pieces[first : first + size]
        rows = [_row(data, piece, int(chosen[:, 2].max())) for piece in chosen.tolist()]
        for (document, *_), losses in zip(chosen.tolist(), _row_losses(backend, rows), strict=True):
            yield document, losses


def _row(data: Data, piece: list[int], positions: int) -> Row:
    """A piece at the start of a row; causal layers see nothing of the places behind it."""
    row, source = Row(positions), data.heldout.source
    row.add(source.read(*piece), source.targets(*piece))
    return row


@torch.no_grad()
def _row_losses(backend: Backend, rows: list[Row]) -> list[list[float]]:
    """Cross entropy of the targets of each row."""
    labels_BS = torch.from_numpy(np.stack([row.labels for row in rows]))
    logits_BSV = widen(backend.logits(torch.from_numpy(np.stack([row.ids for row in rows]))))
    targets_BS = labels_BS.to(logits_BSV.device)
    losses_BS = F.cross_entropy(
        logits_BSV.transpose(1, 2), targets_BS, ignore_index=NO_TARGET, reduction="none"
    ).cpu()
    places = zip(losses_BS, labels_BS, strict=True)
    return [losses_S[labels_S != NO_TARGET].tolist() for losses_S, labels_S in places]
