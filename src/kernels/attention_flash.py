"""FlashAttention-2 as torch has it: `sdpa_flash`, `varlen_attn` for packed samples, and values padded (OP-2).

All three call the operation below `F.scaled_dot_product_attention` and `torch.nn.attention.varlen`, which is
the same for both: it gives the log-sum-exp, its backward takes (o', l'), and it shares key heads in every
torch, where the function above it wants a word that torch 2.11 does not know. Its backward is deterministic
where torch's switch for deterministic algorithms is on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from src.kernels.attention_rule import (
    BACKWARD,
    FORWARD,
    by_sample,
    by_token,
    differentiable,
    gradients,
    padded_values,
    results,
    shaped_like,
    tokens,
    up_to_256,
)
from src.kernels.declaration import AMPERE_ON, Implementation
from src.kernels.opaque import opaque


def varlen_attn(
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


def sdpa_flash(
    q_BSHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    scale: float,
    documents_BS: None = None,
    window: None = None,
    sinks_H: Tensor | None = None,
    cu_seqlens: None = None,
) -> tuple[Tensor, Tensor]:
    """`varlen_attn` over whole samples, what SDPA runs under its name."""
    assert documents_BS is None, "sdpa_flash was chosen for samples that are full documents"
    return _flash(q_BSHC, k_BSGC, v_BSGC, sinks_H, None, scale, None)


def padded(
    q_BSHC: Tensor,
    k_BSGC: Tensor,
    v_BSGU: Tensor,
    scale: float,
    documents_BS: Tensor | None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`varlen_attn` with zeros behind the values: 1.2 times the operations for heads of 192 and 128."""
    wide_BSGC = F.pad(v_BSGU, (0, q_BSHC.shape[-1] - v_BSGU.shape[-1]))
    o_BSHC, lse_BHS = varlen_attn(q_BSHC, k_BSGC, wide_BSGC, scale, documents_BS, window, sinks_H, cu_seqlens)
    return o_BSHC[..., : v_BSGU.shape[-1]], lse_BHS


def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    samples, length = q.shape[:2]
    heads = (q, k, v) if cu_seqlens is None else tokens(q, k, v)
    o, lse, *_ = _FORWARD(
        *heads, cu_seqlens, cu_seqlens, length, length, 0.0, window is None, False, **_places(scale, window)
    )
    return o.view(q.shape).contiguous(), lse if cu_seqlens is None else by_sample(lse, samples)


def _forward_shapes(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    return results(q, v, cu_seqlens)


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse_BHS: Tensor,
    cu_seqlens: Tensor | None, scale: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tensors: tuple[Tensor, ...] = (do.contiguous(), q, k, v, o)
    length, lse = q.shape[1], lse_BHS.contiguous()
    if cu_seqlens is not None:
        tensors, lse = tokens(*tensors), by_token(lse_BHS)
    # Without dropout nobody reads the state of the generator.
    seed, unused = q.new_empty(2, dtype=torch.uint64), q.new_empty(0)
    grads = _BACKWARD(
        *tensors, lse, cu_seqlens, cu_seqlens, length, length, 0.0, window is None, seed, unused,
        **_places(scale, window),
    )  # fmt: skip
    return shaped_like((q, k, v), grads)


def _backward_shapes(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse_BHS: Tensor,
    cu_seqlens: Tensor | None, scale: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return gradients(q, k, v)


def _places(scale: float, window: int | None) -> Mapping[str, float]:
    """Keys left of the query, which its own is not among, and right of it; -1 is no bound."""
    left = -1 if window is None else window - 1
    return {"scale": scale, "window_size_left": left, "window_size_right": 0}


_FORWARD = torch.ops.aten._flash_attention_forward
_BACKWARD = torch.ops.aten._flash_attention_backward
_flash = differentiable(
    opaque("flash", FORWARD, _forward, _forward_shapes),
    opaque("flash_backward", BACKWARD, _backward, _backward_shapes),
)


def _padded_widths(widths: Mapping[str, int], dtype: torch.dtype) -> str | None:
    return padded_values(widths, dtype) or up_to_256(widths, dtype)


def _declare(
    name: str, function: Callable[..., tuple[Tensor, Tensor]], features: set[str], saves: str
) -> Implementation:
    return Implementation(
        "attention",
        name,
        function,
        source="library",
        deterministic=(True, True),
        by_switch=True,
        saves=saves,
        devices=frozenset({"cuda"}),
        archs=AMPERE_ON,
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        features=frozenset(features),
        shapes=_padded_widths,
    )


IMPLEMENTATIONS = (
    _declare("sdpa_flash", sdpa_flash, {"gqa", "sinks"}, "q, k, v, o, lse"),
    _declare("varlen_attn", varlen_attn, {"packed", "gqa", "window", "sinks"}, "q, k, v, o, lse"),
    _declare(
        "sdpa_flash_padded",
        padded,
        {"packed", "unequal_widths", "gqa", "window", "sinks"},
        "q, k, padded v, padded o, lse",
    ),
)
