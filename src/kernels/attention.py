"""Causal attention; value heads may be narrower than key heads, and fewer than query heads (OP-2).

Every implementation also returns the logarithm of each softmax's denominator, [B,H,S] in fp32 at least: the
log-sum-exp of the query's scores, its head's sink among them if there are sinks. So o = Σ exp(score - lse)·v
either way. It carries no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from src.kernels.attention_rule import differentiable, padded_values, whole_blocks
from src.kernels.declaration import EAGER, HOPPER_ON, Implementation
from src.kernels.dtypes import widen


def attention(
    q_BSHC: Tensor,
    k_BSGC: Tensor,
    v_BSGU: Tensor,
    scale: float,
    documents_BS: Tensor | None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale·q·kᵀ)·v over the keys j ≤ i of the same document: o [B,S,H,U], lse [B,H,S].

    Scores and softmax are fp32 at least. Documents are given twice, each kernel reads the form that it wants:
    `documents_BS`, int32 and never falling along a sample, numbers the document of each position;
    `cu_seqlens`, int32 [N+1], is where documents and samples begin in the flattened [B·S] positions, and
    their end. Both None means that each sample is one document, and no operation is issued for it. Of
    G heads of keys and values, each serves H/G query heads that follow one another. With `window` W, only
    keys i - W < j count, W with the query's own (ATT-6). `sinks_H` are a logit per head, not scaled, that
    joins the denominator and has no value (ATT-5). Attention Is All You Need (arXiv 1706.03762, eq. 1); GQA
    (arXiv 2305.13245, sec. 2.2); sinks as in transformers' `gpt_oss`.
    """
    heads = q_BSHC.shape[2]
    q_BHSC, k_BHSC, v_BHSU = (_shared(widen(x), heads).transpose(1, 2) for x in (q_BSHC, k_BSGC, v_BSGU))
    length = q_BSHC.shape[1]
    allowed = torch.ones(length, length, dtype=torch.bool, device=q_BSHC.device).tril()
    if window is not None:
        allowed = allowed.triu(1 - window)
    if documents_BS is not None:
        allowed = allowed & (documents_BS[:, None, :, None] == documents_BS[:, None, None, :])
    scores_BHSX = ((q_BHSC * scale) @ k_BHSC.transpose(-1, -2)).masked_fill(~allowed, float("-inf"))
    if sinks_H is not None:  # One more column, that of a key whose value is zero.
        column_BHS1 = widen(sinks_H)[:, None, None].expand(*scores_BHSX.shape[:3], 1)
        scores_BHSX = torch.cat((scores_BHSX, column_BHS1), -1)
    lse_BHS = scores_BHSX.detach().logsumexp(-1)
    o_BSHU = (scores_BHSX.softmax(-1)[..., :length] @ v_BHSU).transpose(1, 2)
    return o_BSHU.to(v_BSGU.dtype), lse_BHS


def _shared(x_BSGC: Tensor, heads: int) -> Tensor:
    """One head for each query head: query head h reads head h // (H/G)."""
    groups = x_BSGC.shape[2]
    return x_BSGC if groups == heads else x_BSGC.repeat_interleave(heads // groups, 2)


def sdpa_cpu(
    q_BSHC: Tensor,
    k_BSGC: Tensor,
    v_BSGU: Tensor,
    scale: float,
    documents_BS: Tensor | None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention` by torch's fused CPU kernel, with the value heads padded to the width of the keys.

    The kernel is called by its private name: so it gives the log-sum-exp, and takes a mask beside causality.
    It reads shared key heads where they are, without a copy for each query head.
    """
    padded_BSGC = F.pad(v_BSGU, (0, q_BSHC.shape[-1] - v_BSGU.shape[-1]))
    heads, mask = (q_BSHC, k_BSGC, padded_BSGC), _mask(q_BSHC, documents_BS, window)
    if sinks_H is None:
        o_BSHC, lse_BHS = _cpu_forward(*heads, mask, scale, None)
    else:
        o_BSHC, lse_BHS = _cpu_with_sinks(*heads, sinks_H, mask, scale, None)
    return o_BSHC[..., : v_BSGU.shape[-1]], lse_BHS


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, window: int | None
) -> Sequence[Tensor]:
    o_BHSC, lse_BHS = _FORWARD(*_heads_first(q, k, v), is_causal=True, attn_mask=mask, scale=scale)
    return o_BHSC.transpose(1, 2), lse_BHS


def _cpu_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse_BHS: Tensor,
    mask: Tensor | None, scale: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    do, q, k, v, o = _heads_first(do, q, k, v, o)
    grads = _BACKWARD(do, q, k, v, o, lse_BHS, 0.0, True, attn_mask=mask, scale=scale)
    dq, dk, dv = _heads_first(*grads)
    return dq, dk, dv


_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_cpu_with_sinks = differentiable(_cpu_forward, _cpu_backward)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """[B,S,H,C] to [B,H,S,C] and back; views."""
    return [x.transpose(1, 2) for x in tensors]


def _mask(q_BSHC: Tensor, documents_BS: Tensor | None, window: int | None) -> Tensor | None:
    """What is added to the scores besides causality: 0 where a query sees a key, -1e30 or less elsewhere."""
    mask = None if documents_BS is None else _distance(documents_BS)
    if window is not None:
        places_S = torch.arange(q_BSHC.shape[1], device=q_BSHC.device, dtype=torch.float32)
        too_far_SS = (places_S[:, None] - places_S - (window - 1)).clamp_(min=0).mul_(-1e30)
        mask = too_far_SS[None, None] if mask is None else mask.add_(too_far_SS)
    return None if mask is None else mask.to(q_BSHC.dtype)


def _distance(documents_BS: Tensor) -> Tensor:
    """0 within a document, −1e30 or less across; [B,1,S,S]. Comparing and `where` took four times as long."""
    ids = documents_BS.float()
    return (ids[:, None, :, None] - ids[:, None, None, :]).abs_().mul_(-1e30)


def sdpa_cudnn(
    q_BSHC: Tensor,
    k_BSGC: Tensor,
    v_BSGU: Tensor,
    scale: float,
    documents_BS: Tensor | None,
    window: None = None,
    sinks_H: Tensor | None = None,
    cu_seqlens: None = None,
) -> tuple[Tensor, Tensor]:
    """`attention` over whole samples by cuDNN.

    Called by its private name, as SDPA's choice depends on switches of the process and drops the log-sum-exp.
    """
    assert documents_BS is None, "sdpa_cudnn was chosen for samples that are full documents"
    heads = (q_BSHC, k_BSGC, v_BSGU)
    if sinks_H is not None:
        return _cudnn_with_sinks(*heads, sinks_H, None, scale, None)
    o_BSHU, lse_BHS, *_ = _cudnn_forward(*heads, None, scale, None)
    return o_BSHU, lse_BHS


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, extra: None, scale: float, window: None
) -> tuple[Tensor, ...]:
    q, k, v = _heads_first(q, k, v)
    o_BHSU, lse, _, _, _, _, seed, offset, _ = _CUDNN(q, k, v, None, True, 0.0, True, False, scale=scale)
    return o_BHSU.transpose(1, 2), lse.view(q.shape[:3]), seed, offset


def _cudnn_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse_BHS: Tensor,
    extra: None, scale: float, window: None, seed: Tensor, offset: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    length, (do, q, k, v, o) = q.shape[1], _heads_first(do, q, k, v, o)
    grads = _CUDNN_BACKWARD(
        do, q, k, v, o, lse_BHS.contiguous()[..., None], seed, offset, None, None, None, length, length,
        0.0, True, scale=scale,
    )  # fmt: skip
    dq, dk, dv = _heads_first(*grads)
    return dq, dk, dv


_CUDNN = torch.ops.aten._scaled_dot_product_cudnn_attention
_CUDNN_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
_cudnn_with_sinks = differentiable(_cudnn_forward, _cudnn_backward)


def sdpa_efficient(
    q_BSHC: Tensor,
    k_BSGC: Tensor,
    v_BSGU: Tensor,
    scale: float,
    documents_BS: Tensor | None,
    window: None = None,
    sinks_H: None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention` by torch's memory-efficient kernel, which takes a mask: packed samples of any widths."""
    length = q_BSHC.shape[1]
    bias_BHSS = None
    if documents_BS is not None:
        # The kernel wants rows of the mask on 16 bytes.
        padded = _distance(F.pad(documents_BS, (0, -length % 8))).to(q_BSHC.dtype)[..., :length, :length]
        bias_BHSS = padded.expand(-1, q_BSHC.shape[2], -1, -1)
    o_BHSU, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        *(_shared(x, q_BSHC.shape[2]).transpose(1, 2) for x in (q_BSHC, k_BSGC, v_BSGU)),
        bias_BHSS, True, 0.0, True, scale=scale,
    )  # fmt: skip
    return o_BHSU.transpose(1, 2), lse[..., :length]


IMPLEMENTATIONS = (
    Implementation(
        "attention",
        EAGER,
        attention,
        deterministic=(True, True),
        saves="q, k, v, probabilities",
        features=frozenset({"packed", "unequal_widths", "gqa", "window", "sinks", "context_parallel"}),
    ),
    Implementation(
        "attention",
        "sdpa_cpu",
        sdpa_cpu,
        source="library",
        deterministic=(True, True),
        saves="q, k, padded v, padded o, lse",
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        features=frozenset({"packed", "unequal_widths", "gqa", "window", "sinks"}),
        shapes=padded_values,
    ),
    Implementation(
        "attention",
        "sdpa_cudnn",
        sdpa_cudnn,
        source="library",
        deterministic=(True, False),
        saves="q, k, v, o, lse",
        devices=frozenset({"cuda"}),
        archs=HOPPER_ON,
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        features=frozenset({"unequal_widths", "gqa", "sinks"}),
        shapes=whole_blocks,
    ),
    Implementation(
        "attention",
        "sdpa_efficient",
        sdpa_efficient,
        source="library",
        deterministic=(True, False),
        saves="q, k, v, o, lse, mask",
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        features=frozenset({"packed", "unequal_widths", "gqa"}),
        shapes=whole_blocks,
    ),
)
