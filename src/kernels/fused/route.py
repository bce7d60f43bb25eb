"""Triton kernels of OP-7: scores, choice and weights of a tile of tokens in one pass, and the gradient."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest number in fp32, above the −∞ of what is out for good."""


@triton.jit
def _first_largest(key, left, e, BLOCK_E: tl.constexpr):
    """[T,1], lowest index of the largest key of those that are left, among −∞ too."""
    top = tl.max(tl.where(left, key, float("-inf")), 1)[:, None]
    return tl.min(tl.where(left & (key == top), e, BLOCK_E), 1)[:, None]


@triton.jit
def _outside(
    key, left, e, GROUPS: tl.constexpr, KEPT: tl.constexpr, SIZE: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Experts of the groups that are not kept; a group counts as its largest."""
    group = e // SIZE
    best = key
    for index in tl.static_range(GROUPS):
        top = tl.max(tl.where(left & (group == index), key, float("-inf")), 1)[:, None]
        best = tl.where(group == index, top, best)
    for _ in tl.static_range(KEPT):
        left = left & (group != _first_largest(best, left, e, BLOCK_E) // SIZE)
    return left


@triton.jit
def route_kernel(
    logits_ptr, bias_ptr, given_ptr, ids_ptr, weights_ptr, scores_ptr, tokens, scale,
    BIASED: tl.constexpr, GIVEN: tl.constexpr, OF_CHOSEN: tl.constexpr, SHARED: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`TOKENS` tokens a program; see `route`. A NaN counts as the largest, as torch has it."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    e, k = tl.arange(0, BLOCK_E)[None], tl.arange(0, BLOCK_K)[None]
    inside, slot, is_slot = (token < tokens) & (e < E), token * K + k, (token < tokens) & (k < K)
    x = tl.where(e < E, tl.load(logits_ptr + token * E + e, mask=inside, other=0.0), float("-inf"))
    largest = tl.max(x, 1)[:, None]
    powers = tl.exp(x - largest)
    total = tl.sum(powers, 1)[:, None]
    scores = powers / total
    tl.store(scores_ptr + token * E + e, scores, mask=inside)
    if GIVEN:
        ids = tl.load(given_ptr + slot, mask=is_slot, other=0).to(tl.int32)
    else:
        key, out = x if OF_CHOSEN else scores, 0.0
        if BIASED:
            key += tl.load(bias_ptr + e, mask=e < E, other=0.0)
            key, out = tl.where(key < LOWEST, LOWEST, key), LOWEST
        key = tl.where(key == key, key, float("inf"))
        left = (e < E) & (token >= 0)
        if KEPT < GROUPS:
            key = tl.where(_outside(key, left, e, GROUPS, KEPT, E // GROUPS, BLOCK_E), out, key)
        ids = tl.zeros((TOKENS, BLOCK_K), tl.int32)
        for index in tl.static_range(K):
            chosen = _first_largest(key, left, e, BLOCK_E)
            ids = tl.where(k == index, chosen, ids)
            left = left & (e != chosen)
    tl.store(ids_ptr + slot, ids, mask=is_slot)
    weights = tl.load(logits_ptr + token * E + ids, mask=is_slot, other=float("-inf"))
    if OF_CHOSEN:
        largest = tl.max(weights, 1)[:, None]
    weights = tl.where(k < K, tl.exp(weights - largest), 0.0)
    if not OF_CHOSEN:
        weights = weights / total
    if OF_CHOSEN or SHARED:
        weights = weights / tl.sum(weights, 1)[:, None]
    tl.store(weights_ptr + slot, weights * scale, mask=is_slot)


@triton.jit
def route_backward_kernel(
    dweights_ptr, dscores_ptr, scores_ptr, ids_ptr, weights_ptr, dlogits_ptr, tokens, scale,
    SCORED: tl.constexpr, OF_CHOSEN: tl.constexpr, SHARED: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """With s = softmax(l) and c the chosen: w = scale·c, or scale·c/Σc, which a softmax of theirs is too.

    dc = scale·dw, or (scale·dw - Σ scale·dw·c/Σc)/Σc; ds = dscores + dc at the chosen; dl = s·(ds - Σ s·ds).
    """
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    e, k = tl.arange(0, BLOCK_E)[None], tl.arange(0, BLOCK_K)[None]
    inside, slot, is_slot = (token < tokens) & (e < E), token * K + k, (token < tokens) & (k < K)
    scores = tl.load(scores_ptr + token * E + e, mask=inside, other=0.0)
    ids = tl.load(ids_ptr + slot, mask=is_slot, other=0)
    dchosen = tl.load(dweights_ptr + slot, mask=is_slot, other=0.0) * scale
    if OF_CHOSEN:
        share = tl.load(weights_ptr + slot, mask=is_slot, other=0.0) / scale
        dchosen = share * (dchosen - tl.sum(dchosen * share, 1)[:, None])
    elif SHARED:
        chosen = tl.load(scores_ptr + token * E + ids, mask=is_slot, other=0.0)
        total = tl.sum(chosen, 1)[:, None]
        dchosen = (dchosen - tl.sum(dchosen * chosen, 1)[:, None] / total) / total
    there = tl.zeros((TOKENS, BLOCK_E), tl.float32)
    for index in tl.static_range(K):
        expert = tl.sum(tl.where(k == index, ids, 0), 1)[:, None]
        there += tl.where(e == expert, tl.sum(tl.where(k == index, dchosen, 0.0), 1)[:, None], 0.0)
    dscores = tl.zeros((TOKENS, BLOCK_E), tl.float32) if OF_CHOSEN else there
    if SCORED:
        dscores += tl.load(dscores_ptr + token * E + e, mask=inside, other=0.0)
    dlogits = scores * (dscores - tl.sum(scores * dscores, 1)[:, None])
    if OF_CHOSEN:
        dlogits += there
    tl.store(dlogits_ptr + token * E + e, dlogits, mask=inside)
