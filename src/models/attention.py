"""Attention of a layer: the operation where all positions are here, the engine's where they are not."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from src.kernels.registry import Ops
from src.models.protocol import Batch


def attend(
    ops: Ops,
    batch: Batch,
    q_BSHC: Tensor,
    k_BSGC: Tensor,
    v_BSGU: Tensor,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """softmax(scale·q·kᵀ)·v over the keys of the same document up to each query, [B,S,H,U].

    Of G heads of keys and values, each serves H/G query heads that follow one another. `window` is the number
    of keys that a query sees, its own included (ATT-6); `sinks_H` holds a logit per head that joins the
    denominator (ATT-5).
    """
    if batch.context is not None:
        return batch.context.attend(
            q_BSHC, (k_BSGC, v_BSGU), None, (), scale, batch.documents_BS, window, sinks_H
        )
    asked = {"window": window, "sinks_H": sinks_H}
    options: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    o_BSHU, _ = ops.attention(q_BSHC, k_BSGC, v_BSGU, scale, batch.documents_BS, **options)
    out: Tensor = o_BSHU
    return out
