"""flash-attn 2, by the functions below its public ones, which hide the backward from a compiler (OP-2).

They are called as version 2.8 has them: forwards give (o, lse, …), backwards write dq, dk and dv in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from src.kernels.attention_rule import (
    BACKWARD,
    FORWARD,
    by_sample,
    by_token,
    differentiable,
    gradients,
    results,
    tokens,
    up_to_256,
)
from src.kernels.declaration import AMPERE_ON, Implementation
from src.kernels.opaque import opaque


def flash_attn(
    q_BSHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    scale: float,
    documents_BS: Tensor | None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention` over packed or whole samples, with value heads as wide as key heads."""
    assert documents_BS is None or cu_seqlens is not None, "packed samples come with cu_seqlens"
    return _flash(q_BSHC, k_BSGC, v_BSGC, sinks_H, cu_seqlens, scale, window)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    from flash_attn import flash_attn_interface as kernels

    left = -1 if window is None else window - 1  # Keys besides the query's own; -1 is no bound.
    places = (0.0, scale, True, left, 0, 0.0, None, False)
    if cu_seqlens is None:
        o, lse, *_ = kernels._flash_attn_forward(q, k, v, *places)
        return o, lse
    bounds = (cu_seqlens, cu_seqlens, q.shape[1], q.shape[1])
    o, lse, *_ = kernels._flash_attn_varlen_forward(*tokens(q, k, v), *bounds, *places)
    return o.view(q.shape), by_sample(lse, q.shape[0])


def _forward_shapes(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    return results(q, v, cu_seqlens)


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse_BHS: Tensor,
    cu_seqlens: Tensor | None, scale: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from flash_attn import flash_attn_interface as kernels

    left, fixed = -1 if window is None else window - 1, torch.are_deterministic_algorithms_enabled()
    places = (0.0, scale, True, left, 0, 0.0, None, fixed)
    tensors, grads = (do.contiguous(), q, k, v, o), gradients(q, k, v)
    if cu_seqlens is None:
        kernels._flash_attn_backward(*tensors, lse_BHS.contiguous(), *grads, *places)
        return grads
    bounds = (cu_seqlens, cu_seqlens, q.shape[1], q.shape[1])
    kernels._flash_attn_varlen_backward(
        *tokens(*tensors), by_token(lse_BHS), *tokens(*grads), *bounds, *places
    )
    return grads


def _backward_shapes(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse_BHS: Tensor,
    cu_seqlens: Tensor | None, scale: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return gradients(q, k, v)


_flash = differentiable(
    opaque("flash_attn_2", FORWARD, _forward, _forward_shapes),
    opaque("flash_attn_2_backward", BACKWARD, _backward, _backward_shapes),
)

IMPLEMENTATIONS = (
    Implementation(
        "attention",
        "flash_attn",
        flash_attn,
        source="library",
        deterministic=(True, True),
        by_switch=True,
        saves="q, k, v, o, lse",
        devices=frozenset({"cuda"}),
        archs=AMPERE_ON,
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        features=frozenset({"packed", "gqa", "window", "sinks"}),
        packages={"flash-attn": ">=2.8,<3"},
        shapes=up_to_256,
    ),
)
