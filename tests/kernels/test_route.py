"""OP-7 and ROUTE-1: choice and weights against a loop in plain Python."""

from __future__ import annotations

from math import exp
from typing import Any

import pytest
import torch
from torch import Tensor

from src.kernels.route import Routed, route

E, K = 15, 3


def by_hand(logits: list[float], groups: int, kept: int, top_k: int) -> tuple[list[int], list[float]]:
    """The rule of ROUTE-1 for one token: best groups by their largest score, others count as 0."""
    scores = torch.tensor(logits, dtype=torch.float64).softmax(0).tolist()
    size = len(scores) // groups
    best = sorted(range(groups), key=lambda g: (-max(scores[g * size : (g + 1) * size]), g))[:kept]
    masked = [score if index // size in best else 0.0 for index, score in enumerate(scores)]
    ids = sorted(range(len(scores)), key=lambda e: (-masked[e], e))[:top_k]
    return ids, [scores[e] for e in ids]


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (5, 2), (3, 1), (5, 5)])
@pytest.mark.parametrize("tied", [False, True])
def test_route_1_choice_and_weights(groups: int, kept: int, tied: bool) -> None:
    logits = torch.randn(200, E, generator=torch.Generator().manual_seed(groups))
    logits = logits.round() if tied else logits
    routed = route(logits, K, groups=groups, groups_kept=kept, renormalise=False, scale=2.5)
    for token in range(200):
        ids, weights = by_hand(logits[token].tolist(), groups, kept, K)
        assert routed.ids_TK[token].tolist() == ids
        assert routed.weights_TK[token].tolist() == pytest.approx([2.5 * w for w in weights], rel=1e-5)
    assert routed.ids_TK.dtype == torch.int32
    assert torch.allclose(routed.scores_TE, logits.softmax(-1))


@pytest.mark.parametrize("logits", [torch.zeros(4, E), torch.full((4, E), 1e4), torch.eye(4, E) * 1e4])
def test_mod_4_ties_go_to_the_lowest_id_and_ids_are_distinct(logits: Tensor) -> None:
    """In the last case all scores but one underflow to 0 and the masked groups are 0 too."""
    ids = route(logits, K, groups=5, groups_kept=2, renormalise=False, scale=1.0).ids_TK
    assert all(len(set(row)) == K for row in ids.tolist())
    if not logits.diff(dim=1).any():
        assert ids.tolist() == [[0, 1, 2]] * 4


def test_given_ids_skip_the_choice() -> None:
    logits = torch.randn(6, E, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[14, 0, 7]] * 6, dtype=torch.int32)
    routed = route(logits, K, groups=5, groups_kept=2, renormalise=False, scale=3.0, ids_TK=ids)
    assert torch.equal(routed.ids_TK, ids)
    assert torch.allclose(routed.weights_TK, 3.0 * logits.softmax(-1)[:, [14, 0, 7]])


def test_route_6_the_gradient_passes_through_the_softmax_over_all() -> None:
    logits = torch.randn(1, E, generator=torch.Generator().manual_seed(0)).requires_grad_()
    routed: Routed = route(logits, K, groups=1, groups_kept=1, renormalise=False, scale=1.0)
    (grad,) = torch.autograd.grad(routed.weights_TK.sum(), logits)
    p = logits.detach().softmax(-1)
    chosen = torch.zeros_like(p).scatter(1, routed.ids_TK.long(), 1.0)
    assert torch.allclose(grad, p * (chosen - (p * chosen).sum()), atol=1e-7)
    others = grad[chosen == 0]
    assert bool((others != 0).all())


def test_route_4_softmax_of_the_chosen_logits() -> None:
    """ROUTE-4, ROUTE-5: the K largest logits and a softmax over them; the scores are over all experts.

    The other rule, renormalised, gives the same, but for logits whose softmax underflows: there the choice
    still goes by the logits.
    """
    logits = torch.randn(200, E, generator=torch.Generator().manual_seed(4)).requires_grad_()
    upstream = torch.randn(200, K, generator=torch.Generator().manual_seed(5))
    plain: dict[str, Any] = {"groups": 1, "groups_kept": 1, "scale": 1.0}
    routed = route(logits, K, renormalise=False, scoring="softmax_of_chosen", **plain)
    for token in range(200):
        row = logits[token].tolist()
        ids = sorted(range(E), key=lambda e: (-row[e], e))[:K]
        total = sum(exp(row[e]) for e in ids)
        assert routed.ids_TK[token].tolist() == ids
        assert routed.weights_TK[token].tolist() == pytest.approx(
            [exp(row[e]) / total for e in ids], rel=1e-5
        )
    assert torch.allclose(routed.scores_TE, logits.softmax(-1))
    other = route(logits, K, renormalise=True, **plain)
    pair = (routed.weights_TK, other.weights_TK)
    found, wanted = (torch.autograd.grad(w, logits, upstream, retain_graph=True)[0] for w in pair)
    assert float((pair[0] - pair[1]).detach().abs().max()) < 1e-6
    assert float((found - wanted).abs().max()) < 1e-6
    far = torch.tensor([[0.0, -300.0, -200.0, 1000.0, -250.0]])
    assert route(far, K, renormalise=False, scoring="softmax_of_chosen", **plain).ids_TK.tolist() == [
        [3, 0, 2]
    ]


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_route_5_renormalised_scores_are_the_softmax_of_the_chosen_logits(scale: float) -> None:
    """ROUTE-3, ROUTE-5: softmax over all, top-K, division by the sum, then the scale; the gradient too."""
    logits = torch.randn(200, E, generator=torch.Generator().manual_seed(4)).requires_grad_()
    upstream = torch.randn(200, K, generator=torch.Generator().manual_seed(5))
    routed = route(logits, K, groups=1, groups_kept=1, renormalise=True, scale=scale)
    chosen, ids = logits.topk(K, -1)
    want = scale * chosen.softmax(-1)
    assert torch.equal(routed.ids_TK.long(), ids)
    assert float((routed.weights_TK - want).detach().abs().max()) < 1e-6 * scale
    assert torch.allclose(routed.scores_TE, logits.softmax(-1))
    found, wanted = (torch.autograd.grad(w, logits, upstream)[0] for w in (routed.weights_TK, want))
    assert float((found - wanted).abs().max()) < 1e-6 * scale


def biased(logits: list[float], bias: list[float], groups: int, kept: int) -> tuple[list[int], list[float]]:
    """The choice by score plus bias for one token, what is out left out; weights without the bias."""
    scores = torch.tensor(logits, dtype=torch.float64).softmax(0).tolist()
    value = [score + b for score, b in zip(scores, bias, strict=True)]
    size = E // groups
    best = sorted(range(groups), key=lambda g: (-max(value[g * size : (g + 1) * size]), g))[:kept]
    ids = sorted((e for e in range(E) if e // size in best), key=lambda e: (-value[e], e))[:K]
    return ids, [scores[e] for e in ids]


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (5, 2), (3, 1), (5, 5)])
@pytest.mark.parametrize("shift", [0.0, -3.0])
def test_route_6_a_bias_moves_the_choice_alone(groups: int, kept: int, shift: float) -> None:
    """ENG-25, ROUTE-6: ids by biased scores, all negative with `shift`; weights and gradient without."""
    generator = torch.Generator().manual_seed(groups)
    logits = torch.randn(200, E, generator=generator, dtype=torch.float64).requires_grad_()
    bias = torch.randn(E, generator=generator, dtype=torch.float64) * 0.1 + shift
    routed = route(logits, K, groups=groups, groups_kept=kept, renormalise=False, scale=2.5, bias_E=bias)
    plain = route(logits, K, groups=groups, groups_kept=kept, renormalise=False, scale=2.5)
    assert not torch.equal(routed.ids_TK, plain.ids_TK)
    assert torch.equal(routed.scores_TE, plain.scores_TE)
    for token in range(200):
        ids, weights = biased(logits[token].tolist(), bias.tolist(), groups, kept)
        assert routed.ids_TK[token].tolist() == ids
        assert routed.weights_TK[token].tolist() == pytest.approx([2.5 * w for w in weights], rel=1e-12)
    given = route(
        logits, K, groups=groups, groups_kept=kept, renormalise=False, scale=2.5, ids_TK=routed.ids_TK
    )
    found, wanted = (torch.autograd.grad(r.weights_TK.square().sum(), logits)[0] for r in (routed, given))
    assert torch.equal(found, wanted)


def test_only_differences_of_the_bias_matter() -> None:
    """ENG-25: after a thousand one-sided updates the choice is that of the centred bias."""
    logits = torch.randn(300, E, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    bias = torch.rand(E, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 0.05 + 1000 * 1e-3
    drifted, centred = (
        route(logits, K, groups=5, groups_kept=2, renormalise=False, scale=1.0, bias_E=b).ids_TK
        for b in (bias, bias - bias.mean())
    )
    assert torch.equal(drifted, centred)


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (5, 1)])
def test_ids_are_distinct_whatever_the_bias(groups: int, kept: int) -> None:
    """OP-7: a bias of −∞ for all experts but one still gives K distinct ids, the one first."""
    bias = torch.full((E,), float("-inf"))
    bias[7] = 0
    logits = torch.randn(20, E, generator=torch.Generator().manual_seed(0))
    ids = route(logits, K, groups=groups, groups_kept=kept, renormalise=False, scale=1.0, bias_E=bias).ids_TK
    assert all(len(set(row)) == K for row in ids.tolist())
    assert ids[:, 0].tolist() == [7] * 20
