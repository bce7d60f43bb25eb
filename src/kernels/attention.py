"""Causal attention; value heads may be narrower than key heads, and fewer than query heads (OP-2).

Both implementations return the log-sum-exp of each query's scores too; it carries no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from src.kernels.declaration import EAGER, HOPPER_ON, Implementation
from src.kernels.dtypes import widen


def attention(
    q_BSHC: Tensor, k_BSGC: Tensor, v_BSGU: Tensor, scale: float, documents_BS: Tensor | None
) -> tuple[Tensor, Tensor]:
    """softmax(scale·q·kᵀ)·v over the keys j ≤ i of the same document: o [B,S,H,U], lse [B,H,S].

    Scores and softmax are fp32 at least; `documents_BS` None means that each sample is one document, and no
    operation is issued for it. Of G heads of keys and values, each serves H/G query heads that follow one
    another. Attention Is All You Need (arXiv 1706.03762, eq. 1); GQA (arXiv 2305.13245, sec. 2.2).
    """
    heads = q_BSHC.shape[2]
    q_BHSC, k_BHSC, v_BHSU = (_shared(widen(x), heads).transpose(1, 2) for x in (q_BSHC, k_BSGC, v_BSGU))
    length = q_BSHC.shape[1]
    allowed = torch.ones(length, length, dtype=torch.bool, device=q_BSHC.device).tril()
    if documents_BS is not None:
        allowed = allowed & (documents_BS[:, None, :, None] == documents_BS[:, None, None, :])
    scores_BHSS = ((q_BHSC * scale) @ k_BHSC.transpose(-1, -2)).masked_fill(~allowed, float("-inf"))
    lse_BHS = scores_BHSS.detach().logsumexp(-1)
    o_BSHU = (scores_BHSS.softmax(-1) @ v_BHSU).transpose(1, 2)
    return o_BSHU.to(v_BSGU.dtype), lse_BHS


def _shared(x_BSGC: Tensor, heads: int) -> Tensor:
    """One head for each query head: query head h reads head h // (H/G)."""
    groups = x_BSGC.shape[2]
    return x_BSGC if groups == heads else x_BSGC.repeat_interleave(heads // groups, 2)


def sdpa_cpu(
    q_BSHC: Tensor, k_BSGC: Tensor, v_BSGU: Tensor, scale: float, documents_BS: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`attention` by torch's fused CPU kernel, with the value heads padded to the width of the keys.

    The kernel is called by its private name: so it gives the log-sum-exp, and takes a mask beside causality.
    It reads shared key heads where they are, without a copy for each query head.
    """
    q_BHSC, k_BGSC, v_BGSU = (x.transpose(1, 2) for x in (q_BSHC, k_BSGC, v_BSGU))
    padding = q_BSHC.shape[-1] - v_BSGU.shape[-1]
    o_BHSC, lse_BHS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_BHSC,
        k_BGSC,
        F.pad(v_BGSU, (0, padding)),
        is_causal=True,
        attn_mask=None if documents_BS is None else _distance(documents_BS).to(q_BSHC.dtype),
        scale=scale,
    )
    return o_BHSC[..., : v_BSGU.shape[-1]].transpose(1, 2), lse_BHS


def _distance(documents_BS: Tensor) -> Tensor:
    """0 within a document, −1e30 or less across; [B,1,S,S]. Comparing and `where` took four times as long."""
    ids = documents_BS.float()
    return (ids[:, None, :, None] - ids[:, None, None, :]).abs_().mul_(-1e30)


def sdpa_cudnn(
    q_BSHC: Tensor, k_BSGC: Tensor, v_BSGU: Tensor, scale: float, documents_BS: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`attention` over whole samples by cuDNN.

    Called by its private name, as SDPA's choice depends on switches of the process and drops the log-sum-exp.
    """
    assert documents_BS is None, "sdpa_cudnn was chosen for samples that are full documents"
    q_BHSC, k_BGSC, v_BGSU = (x.transpose(1, 2) for x in (q_BSHC, k_BSGC, v_BSGU))
    o_BHSU, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_BHSC, k_BGSC, v_BGSU, None, True, 0.0, True, False, scale=scale
    )
    return o_BHSU.transpose(1, 2), lse.view(q_BHSC.shape[:3])


def sdpa_efficient(
    q_BSHC: Tensor, k_BSGC: Tensor, v_BSGU: Tensor, scale: float, documents_BS: Tensor | None
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


def _whole_blocks(widths: Mapping[str, int], dtype: torch.dtype) -> str | None:
    """The CUDA kernels read heads in blocks of 16 bytes."""
    bad = [f"{name} {widths[name]}" for name in ("key", "value") if widths.get(name, 0) * dtype.itemsize % 16]
    return f"needs head widths of a multiple of 16 bytes, which {', '.join(bad)} are not" if bad else None


IMPLEMENTATIONS = (
    Implementation(
        "attention",
        EAGER,
        attention,
        deterministic=(True, True),
        saves="q, k, v, probabilities",
        features=frozenset({"packed", "unequal_widths", "gqa", "context_parallel"}),
    ),
    Implementation(
        "attention",
        "sdpa_cpu",
        sdpa_cpu,
        deterministic=(True, True),
        saves="q, k, padded v, padded o, lse",
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        features=frozenset({"packed", "unequal_widths", "gqa"}),
        shapes=lambda widths, dtype: (
            "needs value heads no wider than key heads"
            if widths.get("value", 0) > widths.get("key", 0)
            else None
        ),
    ),
    Implementation(
        "attention",
        "sdpa_cudnn",
        sdpa_cudnn,
        deterministic=(True, False),
        saves="q, k, v, o, lse",
        devices=frozenset({"cuda"}),
        archs=HOPPER_ON,
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        features=frozenset({"unequal_widths", "gqa"}),
        shapes=_whole_blocks,
    ),
    Implementation(
        "attention",
        "sdpa_efficient",
        sdpa_efficient,
        deterministic=(True, False),
        saves="q, k, v, o, lse, mask",
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        features=frozenset({"packed", "unequal_widths", "gqa"}),
        shapes=_whole_blocks,
    ),
)
