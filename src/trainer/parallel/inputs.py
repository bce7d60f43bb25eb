"""From the loader's records to what a model is given."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from src.models.protocol import Balances, Batch
from src.trainer.data.batch import MicroBatch


def model_batch(micro_batch: MicroBatch, balances: Balances | None) -> Batch:
    """What a layer may know of a micro-batch."""
    return Batch(
        positions_BS=micro_batch.positions_BS,
        cu_seqlens=micro_batch.cu_seqlens,
        documents_BS=micro_batch.documents_BS,
        real_BS=micro_batch.real_BS,
        balances=balances,
    )


def plain_batch(ids_BS: Tensor) -> MicroBatch:
    """Samples that are one full document each, without labels."""
    positions_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device).expand_as(ids_BS)
    labels_BS = torch.full_like(ids_BS, -100)
    return MicroBatch(ids_BS, labels_BS, positions_BS, None, None, None, 0, (-1,) * ids_BS.shape[0])


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
