"""NUM-6: each fault planted in an operation fails the test that is there for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from src.kernels import grouped_mm as products
from src.kernels import linear_cross_entropy as loss
from src.kernels import route as routing
from src.kernels.sort_by_expert import Order
from tests.kernels import test_grouped_mm, test_linear_cross_entropy, test_route, test_rows


def doubled_outer(y_NM: Tensor, x_ND: Tensor, offs_E: Tensor) -> Tensor:
    return 2 * products.loop_outer(y_NM, x_ND, offs_E)


def dirty_tail(x_ND: Tensor, w_EMD: Tensor, offs_E: Tensor) -> Tensor:
    y_NM = products.loop_rows(x_ND, w_EMD, offs_E)
    y_NM[int(offs_E[-1]) :] = 1.0
    return y_NM


def last_first(ids_TK: Tensor, experts: int) -> Order:
    """By expert, but equal ones in reverse: what an unstable sort may give."""
    flat = ids_TK.flatten()
    order = sorted(range(flat.numel()), key=lambda slot: (int(flat[slot]), -slot))
    rows = torch.tensor(order, dtype=torch.int32)
    slots = torch.empty_like(rows)
    slots[rows.long()] = torch.arange(len(order), dtype=torch.int32)
    return Order(rows, slots, (flat[:, None] <= torch.arange(experts)).sum(0).int())


def highest_id_first(x: Tensor, k: int) -> Tensor:
    return x.shape[-1] - 1 - x.flip(-1).sort(dim=-1, descending=True, stable=True).indices[:, :k]


def test_weight_gradient_scaled_by_two() -> None:
    mutant = products._differentiable("mutant_outer", products.loop_rows, doubled_outer)
    with pytest.raises(AssertionError):
        test_grouped_mm.test_values_and_gradients_equal_dense_products(mutant, "uneven")


def test_tail_not_zeroed() -> None:
    mutant = products._differentiable("mutant_tail", dirty_tail, products.loop_outer)
    with pytest.raises(AssertionError):
        test_grouped_mm.test_num_4_rows_past_the_last_offset_are_never_read(mutant)


def test_unstable_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_rows, "sort_by_expert", last_first)
    with pytest.raises(AssertionError):
        test_rows.test_op_8_rows_are_ordered_by_expert_then_slot("random")


def test_ties_to_the_highest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_largest", highest_id_first)
    with pytest.raises(AssertionError):
        test_route.test_route_1_choice_and_weights(5, 2, True)


def test_no_gradient_through_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROUTE-6: the weights themselves stay what they are."""
    monkeypatch.setattr(routing, "_shares", lambda w_TK: w_TK / w_TK.sum(-1, keepdim=True).detach())
    with pytest.raises(AssertionError):
        test_route.test_route_5_renormalised_scores_are_the_softmax_of_the_chosen_logits(1.0)


def test_scaled_before_it_is_renormalised(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROUTE-6: the scale cancels."""

    def mutant(logits_TE: Tensor, top_k: int, **rule: Any) -> routing.Routed:
        routed = routing.route(logits_TE, top_k, **(rule | {"renormalise": False}))
        return routed._replace(weights_TK=routing._shares(routed.weights_TK))

    monkeypatch.setattr(test_route, "route", mutant)
    test_route.test_route_5_renormalised_scores_are_the_softmax_of_the_chosen_logits(1.0)
    with pytest.raises(AssertionError):
        test_route.test_route_5_renormalised_scores_are_the_softmax_of_the_chosen_logits(2.5)


def test_a_sum_over_all_but_the_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """The denominator without the target's own term."""
    original = loss._exponentials

    def mutant(h_CD: Tensor, w_VD: Tensor, label_C1: Tensor, out_CV: Tensor) -> tuple[Tensor, Tensor]:
        nll, total = original(h_CD, w_VD, label_C1, out_CV)
        return nll, total - out_CV.gather(1, label_C1)

    monkeypatch.setattr(loss, "_exponentials", mutant)
    with pytest.raises(AssertionError):
        test_linear_cross_entropy.test_loss_and_gradients_for_any_chunk(8, 1.0, monkeypatch)
