"""Scores, choice of experts and routing weights (OP-7)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from src.kernels.declaration import EAGER, Implementation
from src.kernels.route_triton import Route


class Routed(NamedTuple):
    """What a router hands on."""

    ids_TK: Tensor
    """int32, K distinct experts of each token, best first."""
    weights_TK: Tensor
    """fp32 at least, differentiable."""
    scores_TE: Tensor
    """The scores over all experts, before group masks; they sum to 1."""


def route(
    logits_TE: Tensor,
    top_k: int,
    *,
    groups: int,
    groups_kept: int,
    renormalise: bool,
    scale: float,
    scoring: str = "softmax",
    bias_E: Tensor | None = None,
    ids_TK: Tensor | None = None,
) -> Routed:
    """Softmax over all experts, choice of K within the best groups, weights = scores of the chosen · `scale`.

    With `renormalise` the K scores are divided by their sum first (ROUTE-3). A group's score is its largest;
    experts of groups that are not kept count as 0 (ROUTE-1; DeepSeek-V2, arXiv 2405.04434, sec. 2.2.2, with
    the release's group score). `bias_E` is added to the scores for the choice alone, of groups too; experts
    that are out then count as the lowest number, for a biased score may be negative. Ties go to the lowest
    id. With `ids_TK` given, no choice is made. The weights' gradient passes through softmax and sum, never
    the ids or the bias (ROUTE-6).

    With `scoring="softmax_of_chosen"` the K largest logits are chosen and the weights are a softmax over
    these alone (ROUTE-4, as transformers' `gpt_oss`); the scores are over all experts even so.
    """
    scores_TE = logits_TE.softmax(-1)
    of_chosen = scoring == "softmax_of_chosen"
    assert not (of_chosen and groups_kept < groups), "logits of other groups cannot count as 0"
    chosen_by_TE = logits_TE if of_chosen else scores_TE
    if ids_TK is None:
        ids_TK = _select(chosen_by_TE.detach(), bias_E, top_k, groups, groups_kept)
    weights_TK = chosen_by_TE.gather(1, ids_TK.long())
    if of_chosen:
        weights_TK = weights_TK.softmax(-1)
    if renormalise:
        weights_TK = _shares(weights_TK)
    return Routed(ids_TK, weights_TK * scale if scale != 1 else weights_TK, scores_TE)


def _shares(weights_TK: Tensor) -> Tensor:
    return weights_TK / weights_TK.sum(-1, keepdim=True)


def _select(scores_TE: Tensor, bias_E: Tensor | None, top_k: int, groups: int, groups_kept: int) -> Tensor:
    out = 0.0
    if bias_E is not None:
        out = torch.finfo(scores_TE.dtype).min  # Above the −∞ of what `_largest` has taken already.
        scores_TE = (scores_TE + bias_E).clamp(min=out)
    if groups_kept < groups:
        grouped_TGM = scores_TE.reshape(scores_TE.shape[0], groups, scores_TE.shape[1] // groups)
        kept = _largest(grouped_TGM.amax(-1), groups_kept)
        keep_TG = torch.zeros_like(grouped_TGM[..., 0], dtype=torch.bool).scatter(1, kept, True)
        scores_TE = grouped_TGM.masked_fill(~keep_TG[..., None], out).flatten(1)
    return _largest(scores_TE, top_k).to(torch.int32)


def _largest(x: Tensor, k: int) -> Tensor:
    """Indices of the k largest of each row, ties to the lowest; what is taken is taken out by its index.

    `topk` promises no order among equals, `argmax` the first. A stable sort gives the same on CPU in the same
    time, but as part of a compiled layer one of 128 scores did not compile within a minute (LOG.md).
    """
    places_E = torch.arange(x.shape[-1], device=x.device)
    found = []
    for _ in range(k):
        found.append(x.argmax(-1, keepdim=True))
        x = x.masked_fill(places_E == found[-1], float("-inf"))
    return torch.cat(found, -1)


def triton_route(
    logits_TE: Tensor,
    top_k: int,
    *,
    groups: int,
    groups_kept: int,
    renormalise: bool,
    scale: float,
    scoring: str = "softmax",
    bias_E: Tensor | None = None,
    ids_TK: Tensor | None = None,
) -> Routed:
    """`route` in a pass over the logits, and one back by the closed form."""
    of_chosen = scoring == "softmax_of_chosen"
    assert not (of_chosen and groups_kept < groups), "logits of other groups cannot count as 0"
    choice, weighing = (top_k, groups, groups_kept), (of_chosen, renormalise, scale)
    chosen: Routed = Routed(*Route.apply(logits_TE, choice, weighing, bias_E, ids_TK))  # type: ignore[no-untyped-call]
    return chosen if ids_TK is None else chosen._replace(ids_TK=ids_TK)


IMPLEMENTATIONS = (
    Implementation("route", EAGER, route, deterministic=(True, True), saves="scores, ids"),
    Implementation(
        "route",
        "triton",
        triton_route,
        source="triton",
        deterministic=(True, True),
        saves="scores, ids, weights",
        devices=frozenset({"cuda", "rocm"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    ),
)
