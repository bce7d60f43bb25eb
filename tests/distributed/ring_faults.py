"""Faults of context parallelism, for attention alone and for whole steps (T-5)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from src.models.protocol import Tensors
from src.trainer.backends import native
from src.trainer.data.batch import MicroBatch
from src.trainer.parallel import ring_attention
from src.trainer.parallel.context import Ring
from src.trainer.parallel.ring_attention import Gradients
from src.trainer.runtime import Runtime
from tests.distributed.patches import wrapped


def lost(what: str) -> Any:
    """The gradients of a field of `Gradients` vanish in one step of the ring."""

    def without(original: Any, rule: Any, saved: Any, came: Tensors, *arguments: Any) -> Gradients:
        found: Gradients = original(rule, saved, came, *arguments)
        if saved.q_BSHC.shape[1] > came[0].shape[1]:  # All queries on a front block.
            return replace(found, **{what: tuple(torch.zeros_like(x) for x in getattr(found, what))})
        return found

    return wrapped(ring_attention, "gradients_of_hop", without)


def ring_hop() -> Any:
    """One hop's gradients of keys and values are lost."""
    return lost("sent")


def kv_b_hop() -> Any:
    """One hop's gradient of the weight that expands the latent is lost."""
    return lost("weights")


def local_places() -> Any:
    """Windows and causality count the positions of a rank as if they followed one another."""

    def local(ring: Ring, rank: int, length: int, device: torch.device) -> Tensor:
        return torch.arange(length, device=device)

    return mock.patch.object(ring_attention, "places", local)


def ignored_documents() -> Any:
    """Ids of documents do not travel, and nobody asks for them."""

    def without(original: Any, ring: Ring, *arguments: Any) -> Tensor:
        q, sent, how, weights, scale, _, *rest = arguments
        out: Tensor = original(ring, q, sent, how, weights, scale, None, *rest)
        return out

    return wrapped(Ring, "attend", without)


def local_positions() -> Any:
    """Rotary angles go by a rank's own positions, not by those of the sample."""

    def local(original: Any, micro_batch: MicroBatch, ring: Ring | None) -> MicroBatch:
        part: MicroBatch = original(micro_batch, ring)
        places_S = torch.arange(part.ids_BS.shape[1])
        return replace(part, positions_BS=places_S.expand_as(part.ids_BS))

    return wrapped(native, "own_part", local)


def unsummed_counts() -> Any:
    """Each rank takes the rows of its own part of a sample for those of the sample."""
    return mock.patch.object(Ring, "sum", lambda ring, tensor: tensor)


def counted_by_all() -> Any:
    """Every rank of a ring counts the labels of the sample that they share."""
    return mock.patch.object(Runtime, "counts_samples", True)
