"""From the loader's records to what a model is given."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from src.models.protocol import Balances, Batch, Context
from src.trainer.data.batch import MicroBatch, Whole
from src.trainer.parallel.context import Ring
from src.trainer.parallel.spans import spans


def model_batch(micro_batch: MicroBatch, balances: Balances | None, context: Context | None) -> Batch:
    """What a layer may know of a micro-batch."""
    return Batch(
        positions_BS=micro_batch.positions_BS,
        cu_seqlens=micro_batch.cu_seqlens,
        documents_BS=micro_batch.documents_BS,
        real_BS=micro_batch.real_BS,
        balances=balances,
        context=context,
    )


def in_any_number(micro_batch: MicroBatch) -> MicroBatch:
    """The same, its documents marked as a number that a compiler must not count on (CMP-3)."""
    if micro_batch.cu_seqlens is not None:
        torch._dynamo.mark_dynamic(micro_batch.cu_seqlens, 0)
    return micro_batch


def plain_batch(ids_BS: Tensor) -> MicroBatch:
    """Samples that are one full document each, without labels."""
    positions_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device).expand_as(ids_BS)
    labels_BS = torch.full_like(ids_BS, -100)
    return MicroBatch(ids_BS, labels_BS, positions_BS, None, None, None, 0, (-1,) * ids_BS.shape[0])


def whole_labels(micro_batch: MicroBatch) -> Tensor:
    """int64 labels of each whole sample [B]."""
    if micro_batch.whole is not None:
        return micro_batch.whole.labels_B
    return (micro_batch.labels_BS != -100).sum(1)


def whole_tokens(micro_batch: MicroBatch) -> Tensor:
    """int64 positions of each whole sample that are not pads [B]."""
    if micro_batch.whole is not None:
        return micro_batch.whole.tokens_B
    if micro_batch.real_BS is not None:
        return micro_batch.real_BS.sum(1)
    samples, length = micro_batch.ids_BS.shape
    return torch.full((samples,), length, device=micro_batch.ids_BS.device)


def own_part(micro_batch: MicroBatch, ring: Ring | None) -> MicroBatch:
    """The positions of this rank, of a micro-batch that all ranks of a ring have; all without a ring.

    Labels are shifted already, so that the last one of a block is the next token of the sample (PACK-5).
    Ids, labels, positions, documents and pads go through one permutation (PACK-7).
    """
    if ring is None:
        return micro_batch
    front, back = spans(micro_batch.ids_BS.shape[1], ring.size, ring.rank)

    def part(x_BS: Tensor) -> Tensor:
        return torch.cat([x_BS[:, span.start : span.stop] for span in (front, back)], 1)

    def some(x_BS: Tensor | None) -> Tensor | None:
        return None if x_BS is None else part(x_BS)

    return replace(
        micro_batch,
        ids_BS=part(micro_batch.ids_BS),
        labels_BS=part(micro_batch.labels_BS),
        positions_BS=part(micro_batch.positions_BS),
        cu_seqlens=None,
        documents_BS=some(micro_batch.documents_BS),
        real_BS=some(micro_batch.real_BS),
        whole=Whole(whole_labels(micro_batch), whole_tokens(micro_batch)),
    )


def padded(ids_BS: Tensor, ring: Ring | None) -> Tensor:
    """With zeros behind, which causal attention does not see, so that a ring can divide the length."""
    return ids_BS if ring is None else F.pad(ids_BS, (0, -ids_BS.shape[1] % (2 * ring.size)))


def to_device(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The micro-batch with its tensors on the device; the copies do not wait."""
    if device.type == "cpu":
        return micro_batch

    def move(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device, non_blocking=True)

    return replace(
        micro_batch,
        ids_BS=micro_batch.ids_BS.to(device, non_blocking=True),
        labels_BS=micro_batch.labels_BS.to(device, non_blocking=True),
        positions_BS=micro_batch.positions_BS.to(device, non_blocking=True),
        cu_seqlens=move(micro_batch.cu_seqlens),
        documents_BS=move(micro_batch.documents_BS),
        real_BS=move(micro_batch.real_BS),
    )
