"""What the loader hands to the step: the micro-batches of one rank for one optimizer step (LOAD-1)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Whole:
    """What is known of whole samples by who holds a part of their positions."""

    labels_B: Tensor
    """int64, labels that are not -100."""
    tokens_B: Tensor
    """int64, positions that are not pads."""


@dataclass(frozen=True)
class MicroBatch:
    """b samples of S positions. Letters: B samples, S positions."""

    ids_BS: Tensor
    """int64 token ids; pads hold 0."""
    labels_BS: Tensor
    """int64 next token within the document, -100 where there is none (PACK-5)."""
    positions_BS: Tensor
    """int64, restarting at 0 in each document."""
    cu_seqlens: Tensor | None
    """int32 segment starts over the flattened B*S positions, last B*S; None if samples are full documents."""
    documents_BS: Tensor | None
    """int32 segment index, unique within the micro-batch; None as `cu_seqlens`."""
    real_BS: Tensor | None
    """bool, False on pads; None if there are none."""
    target_tokens: int
    """Number of labels that are not -100."""
    samples: tuple[int, ...]
    """Indices of the samples in the packing plan, -1 for a filler (EVAL-1)."""
    first: int = 0
    """Place of the first sample in the order of training, which the others follow; 0 outside training."""
    whole: Whole | None = None
    """Counts of the samples' other positions too, where this holds a part of the positions; else None."""


@dataclass(frozen=True)
class StepBatch:
    """All micro-batches of this rank for one step."""

    micro_batches: tuple[MicroBatch, ...]
    epoch: int
    """Epoch of the step's first sample."""

    @property
    def target_tokens(self) -> int:
        """Labels of this rank's micro-batches that are not -100."""
        return sum(m.target_tokens for m in self.micro_batches)

    @property
    def tokens(self) -> int:
        """Positions of this rank's micro-batches that are not pads."""
        return sum(
            m.ids_BS.numel() if m.real_BS is None else int(m.real_BS.sum()) for m in self.micro_batches
        )
