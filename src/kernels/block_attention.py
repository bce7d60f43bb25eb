"""Attention of some queries to one block of their keys, to be merged with that of the other blocks (ENG-21).

Forward gives the log-sum-exp with which results over disjoint keys are merged; backward takes that over all
keys, so that the gradient of a block is that of the whole softmax. FlashAttention (arXiv 2205.14135, alg. 1,
4); Ring Attention (arXiv 2310.01889). Letters: S queries, T keys, G heads of keys and values, H heads of
queries, of which H/G that follow one another share a head of keys. Everything computed is fp32 at least.
"""

from __future__ import annotations

import torch
from torch import Tensor

from src.kernels.dtypes import widen


def block_attention(
    q_BSHC: Tensor, k_BTGC: Tensor, v_BTGU: Tensor, scale: float, allowed_BST: Tensor | None
) -> tuple[Tensor, Tensor]:
    """softmax(scale·q·kᵀ)·v over this block alone: o [B,S,H,U], lse [B,H,S], both fp32 at least.

    `allowed_BST`, bool [B or 1,S,T], says which query sees which key; None: each sees all. A query that sees
    none gets o = 0 and lse = -inf.
    """
    groups, length = k_BTGC.shape[2], q_BSHC.shape[1]
    scores_BGNT = _scores(q_BSHC, k_BTGC, scale, allowed_BST)
    lse_BGN = scores_BGNT.logsumexp(-1)
    finite_BGN = torch.where(lse_BGN.isfinite(), lse_BGN, 0.0)
    o_BGNU = (scores_BGNT - finite_BGN[..., None]).exp_() @ _heads_first(widen(v_BTGU), groups)
    return _heads_last(o_BGNU, length), _by_head(lse_BGN, length)


def block_attention_backward(
    do_BSHU: Tensor,
    delta_BHS: Tensor,
    q_BSHC: Tensor,
    k_BTGC: Tensor,
    v_BTGU: Tensor,
    lse_BHS: Tensor,
    scale: float,
    allowed_BST: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's part of dq [B,S,H,C], dk [B,T,G,C] and dv [B,T,G,U], fp32 at least.

    `lse_BHS` is that over all keys, and of a sink; `delta_BHS` is Σ_u do·o of the final o. With the
    probabilities p, dS = p·(do·vᵀ − delta) (FlashAttention, app. B.2).
    """
    groups, length = k_BTGC.shape[2], q_BSHC.shape[1]
    lse_BGN1, delta_BGN1 = (x.reshape(x.shape[0], groups, -1, 1) for x in (lse_BHS, delta_BHS))
    p_BGNT = (_scores(q_BSHC, k_BTGC, scale, allowed_BST) - lse_BGN1).exp_()
    do_BGNU, q_BGNC = (_heads_first(widen(x), groups) for x in (do_BSHU, q_BSHC))
    k_BGTC, v_BGTU = (_heads_first(widen(x), groups) for x in (k_BTGC, v_BTGU))
    dv_BGTU = p_BGNT.transpose(-1, -2) @ do_BGNU
    ds_BGNT = p_BGNT * (do_BGNU @ v_BGTU.transpose(-1, -2) - delta_BGN1) * scale
    dk_BGTC = ds_BGNT.transpose(-1, -2) @ q_BGNC
    return _heads_last(ds_BGNT @ k_BGTC, length), dk_BGTC.transpose(1, 2), dv_BGTU.transpose(1, 2)


def _scores(q_BSHC: Tensor, k_BTGC: Tensor, scale: float, allowed_BST: Tensor | None) -> Tensor:
    """[B,G,N,T]; -inf where a query may not look."""
    groups = k_BTGC.shape[2]
    q_BGNC, k_BGTC = _heads_first(widen(q_BSHC) * scale, groups), _heads_first(widen(k_BTGC), groups)
    scores_BGNT = q_BGNC @ k_BGTC.transpose(-1, -2)
    if allowed_BST is None:
        return scores_BGNT
    scores_BGJST = scores_BGNT.view(*scores_BGNT.shape[:2], -1, *allowed_BST.shape[1:])
    return scores_BGJST.masked_fill(~allowed_BST[:, None, None], float("-inf")).flatten(2, 3)


def _heads_first(x_BSHC: Tensor, groups: int) -> Tensor:
    """[B,G,N,C]: the N = H/G·S rows that read one head of keys, so that its heads are never copied."""
    x_BSGJC = x_BSHC.reshape(*x_BSHC.shape[:2], groups, -1, x_BSHC.shape[-1])
    return x_BSGJC.permute(0, 2, 3, 1, 4).flatten(2, 3)


def _heads_last(x_BGNC: Tensor, length: int) -> Tensor:
    """Back to [B,S,H,C]."""
    return x_BGNC.view(*x_BGNC.shape[:2], -1, length, x_BGNC.shape[-1]).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _by_head(x_BGN: Tensor, length: int) -> Tensor:
    """[B,H,S]."""
    return x_BGN.reshape(x_BGN.shape[0], -1, length)
