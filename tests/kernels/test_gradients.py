"""NUM-3: every reference passes `gradcheck` in fp64, with odd sizes; gradients are never None."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from src.kernels import (
    attention,
    combine,
    expert_bias,
    grouped_mm,
    linear_cross_entropy,
    permute,
    rms_norm,
    rope,
    route,
    router_linear,
    swiglu,
)
from src.kernels.sort_by_expert import sort_by_expert

Case = tuple[Callable[..., Tensor], tuple[Tensor, ...]]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def sinks_case(documents_BS: Tensor | None, window: int | None) -> Case:
    def call(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
        return attention.attention(q, k, v, 0.3, documents_BS, window, a)[0]

    return call, (leaf(2, 5, 3, 4), leaf(2, 5, 1, 4), leaf(2, 5, 1, 2), leaf(3))


def attention_case(documents_BS: Tensor | None, groups: int = 3) -> Case:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention.attention(q, k, v, 0.3, documents_BS)[0]

    return call, (leaf(2, 5, 3, 4), leaf(2, 5, groups, 4), leaf(2, 5, groups, 2))


def grouped_case() -> Case:
    offs = torch.tensor([2, 2, 7], dtype=torch.int32)
    return (lambda x, w: grouped_mm.grouped_mm(x, w, offs)), (leaf(7, 3), leaf(3, 5, 3))


def expert_bias_case() -> Case:
    offs = torch.tensor([2, 2, 6], dtype=torch.int32)
    return (lambda x, b: expert_bias.expert_bias(x, b, offs)), (leaf(7, 5), leaf(3, 5))


def route_case(
    groups: int = 1, groups_kept: int = 1, renormalise: bool = False, scoring: str = "softmax"
) -> Case:
    # Far from ties, where a finite difference would change the choice (ROUTE-6).
    logits = (torch.arange(45, dtype=torch.float64).reshape(3, 15) * 7 % 15 / 5).requires_grad_()
    rule: dict[str, Any] = {"groups": groups, "groups_kept": groups_kept, "renormalise": renormalise}
    rule["scoring"] = scoring
    return (lambda x: route.route(x, 3, scale=2.5, ids_TK=None, **rule).weights_TK), (logits,)


def permute_case() -> Case:
    order = sort_by_expert(torch.tensor([[2, 0], [1, 2], [0, 1]], dtype=torch.int32), 3)
    plan = (order.row_slot_N // 2, order.slot_row_N.view(3, 2))

    def weighted(x: Tensor) -> Tensor:
        return permute.permute(x, *plan) * torch.arange(1.0, 7, dtype=x.dtype)[:, None]

    return weighted, (leaf(3, 5),)


def combine_case(tokens: int) -> Case:
    home = torch.arange(3 * tokens).flip(0).to(torch.int32).view(tokens, 3)
    inputs = (leaf(3 * tokens, 4), leaf(tokens, 3), leaf(tokens, 4))
    return (lambda y, weights, residual: combine.combine(y, home, weights, residual)), inputs


def loss_case() -> Case:
    labels, scale = torch.tensor([3, -100, 0, 6]), torch.tensor(0.4, dtype=torch.float64)
    return (lambda h, w: linear_cross_entropy.linear_cross_entropy(h, w, labels, scale)), (
        leaf(4, 3),
        leaf(7, 3),
    )


def rope_case(interleaved: bool) -> Case:
    angles = torch.randn(2, 5, 3, dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    return (lambda x: rope.rope(x, cos, sin, interleaved=interleaved)), (leaf(2, 5, 3, 6),)


CASES: dict[str, Callable[[], Case]] = {
    "attention": lambda: attention_case(None),
    "attention packed": lambda: attention_case(torch.tensor([[0, 0, 1, 2, 2], [3, 3, 3, 3, 4]])),
    "attention of shared heads": lambda: attention_case(None, groups=1),
    "attention with sinks": lambda: sinks_case(None, None),
    "attention with sinks, packed, in a window": lambda: sinks_case(
        torch.tensor([[0, 0, 0, 0, 2], [3, 3, 3, 3, 4]]), 2
    ),
    "combine": lambda: combine_case(5),
    "expert_bias": expert_bias_case,
    "grouped_mm": grouped_case,
    "linear_cross_entropy": loss_case,
    "permute": permute_case,
    "rms_norm": lambda: ((lambda x, w: rms_norm.rms_norm(x, w, 1e-3)[0]), (leaf(4, 7), leaf(7))),
    "rms_norm of a sum": lambda: (
        (lambda x, w, r: torch.cat(rms_norm.rms_norm(x, w, 1e-3, r))),
        (leaf(4, 7), leaf(7), leaf(4, 7)),
    ),
    "rope of neighbours": lambda: rope_case(True),
    "rope of halves": lambda: rope_case(False),
    "route": route_case,
    "route in groups": lambda: route_case(groups=5, groups_kept=2),
    "route renormalised": lambda: route_case(renormalise=True),
    "route by the chosen": lambda: route_case(scoring="softmax_of_chosen"),
    "router_linear": lambda: (router_linear.router_linear, (leaf(4, 5), leaf(3, 5))),
    "swiglu": lambda: (swiglu.swiglu, (leaf(5, 6),)),
    "swiglu within bounds": lambda: (partial(swiglu.swiglu, limit=0.7, alpha=1.702), (leaf(5, 6),)),
}


@pytest.mark.parametrize("name", CASES)
def test_num_3_references_pass_gradcheck(name: str) -> None:
    torch.manual_seed(5)
    function, inputs = CASES[name]()
    assert gradcheck(function, inputs)
    output = function(*inputs)
    assert output.dtype == torch.float64
    grads = torch.autograd.grad(output.square().sum(), inputs)
    assert all(bool(grad.any()) for grad in grads)


EMPTY: dict[str, Callable[[], Case]] = {
    "combine": lambda: combine_case(0),
    "linear_cross_entropy": lambda: (
        lambda h, w: linear_cross_entropy.linear_cross_entropy(
            h, w, torch.empty(0, dtype=torch.int64), torch.tensor(1.0)
        ),
        (leaf(0, 3), leaf(7, 3)),
    ),
    "rms_norm": lambda: ((lambda x, w: rms_norm.rms_norm(x, w, 1e-3)[0]), (leaf(0, 7), leaf(7))),
    "route": lambda: (
        (lambda x: route.route(x, 2, groups=3, groups_kept=1, renormalise=True, scale=2.0).weights_TK),
        (leaf(0, 6),),
    ),
    "swiglu": lambda: (swiglu.swiglu, (leaf(0, 6),)),
    "attention": lambda: (
        lambda q, k, v: attention.attention(q, k, v, 0.3, None)[0],
        (leaf(2, 0, 3, 4), leaf(2, 0, 3, 4), leaf(2, 0, 3, 2)),
    ),
}


@pytest.mark.parametrize("name", EMPTY)
def test_no_tokens_keep_the_graph_and_give_zeros(name: str) -> None:
    function, inputs = EMPTY[name]()
    grads = torch.autograd.grad(function(*inputs).sum(), inputs)
    assert all(not grad.any() for grad in grads)
