"""NUM-7: a mixture's own kernels on a GPU, at the widths of models (NUM-2, NUM-3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from src.kernels import combine, expert_bias, permute, rms_norm, route, sort_by_expert
from tests.kernels.test_gpu import agree, leaves
from tests.models.tools import relative

pytestmark = pytest.mark.gpu
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ROWS = [(1001, 6, 2048), (513, 4, 2880), (7, 8, 7168), (33, 1, 300)]
"""Tokens, K, width."""


@DTYPES
@pytest.mark.parametrize(("tokens", "top_k", "width"), ROWS)
def test_op_6_permute(tokens: int, top_k: int, width: int, dtype: torch.dtype) -> None:
    """Every third token has a slot without a row, as one whose expert another rank holds."""
    order = torch.randperm(tokens * top_k, generator=torch.Generator().manual_seed(0)).cuda()
    order = order[(order % top_k != 1) | (order // top_k % 3 != 0)]
    slots = torch.full((tokens * top_k,), len(order), device="cuda")
    slots = slots.scatter(0, order, torch.arange(len(order), device="cuda")).view(tokens, top_k)
    both = (permute.triton_permute, permute.permute)
    agree(*(lambda x, f=f: f(x, order // top_k, slots) for f in both), leaves((tokens, width), dtype=dtype))


@DTYPES
@pytest.mark.parametrize(("tokens", "top_k", "width"), ROWS)
def test_op_6_combine(tokens: int, top_k: int, width: int, dtype: torch.dtype) -> None:
    slots = torch.randperm(tokens * top_k, generator=torch.Generator().manual_seed(0)).int().cuda()
    slots = slots.view(tokens, top_k)
    both = (combine.triton_combine, combine.combine)
    inputs = leaves((tokens * top_k, width), (tokens, top_k), (tokens, width), dtype=dtype)
    agree(*(lambda y, w, residual, f=f: f(y, slots, w, residual) for f in both), inputs)


@DTYPES
@pytest.mark.parametrize("counts", [[400, 0, 1, 30, 5000, 0, 69], [0, 5501, 0], [0, 0, 64, 64, 0]])
def test_op_12_expert_bias(counts: list[int], dtype: torch.dtype) -> None:
    """ENG-19: rows past the last offset hold NaN, as does the gradient that arrives there, and give zeros."""
    total, experts = sum(counts), len(counts)
    offs = torch.tensor(counts).cumsum(0).int().cuda()
    inputs = leaves((total, 333), (experts, 333), dtype=dtype)
    both = (expert_bias.triton_expert_bias, expert_bias.expert_bias)
    agree(*(lambda rows, bias, f=f: f(rows, bias, offs) for f in both), inputs)
    rows = torch.cat((inputs[0], torch.full((77, 333), torch.nan, device="cuda", dtype=dtype)))
    bias = inputs[1].requires_grad_()
    grads = torch.autograd.grad(
        expert_bias.triton_expert_bias(rows.requires_grad_(), bias, offs), (rows, bias), rows.detach()
    )
    assert torch.equal(grads[0][:total], rows.detach()[:total])
    assert not grads[0][total:].any()
    assert relative(grads[1], torch.stack([g.double().sum(0) for g in inputs[0].split(counts)])) < 5e-3


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1001, 2048), (333, 2880), (70001, 128), (77, 7168), (65, 512)])
def test_op_10_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    """The norm alone, of part of a row, and of a sum, which is a result too."""
    x, w, residual = leaves((rows, width), (width,), (rows, width), dtype=dtype)
    both = (rms_norm.triton_rms_norm, rms_norm.rms_norm)
    agree(*(lambda x, w, f=f: f(x, w, 1e-6)[0] for f in both), [x, w])
    agree(*(lambda x, w, f=f: f(x[:, 32:96], w[:64], 1e-6)[0] for f in both), [x, w])
    agree(*(lambda x, w, r, f=f: torch.cat(f(x, w, 1e-6, r)) for f in both), [x, w, residual])


PLAIN = {"groups": 1, "groups_kept": 1, "renormalise": False, "scale": 1.0}
RULES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "deepseek_v2_lite": (64, 6, PLAIN),
    "deepseek_v2": (160, 6, PLAIN | {"groups": 8, "groups_kept": 3, "scale": 16.0}),
    "qwen3_moe": (128, 8, PLAIN | {"renormalise": True}),
    "gpt_oss": (32, 4, PLAIN | {"scoring": "softmax_of_chosen"}),
}
"""Experts, K and rule."""


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_op_7_route(name: str, biased: bool) -> None:
    """Logits on a grid: equal ones are common, others far enough apart for every rounding."""
    experts, top_k, rule = RULES[name]
    (logits,) = leaves((4099, experts), dtype=torch.float32, std=40.0)
    logits = logits.round() / 32
    bias = (torch.arange(experts, device="cuda") % 3 == 0) * 0.5 if biased else None
    found, want = (f(logits, top_k, bias_E=bias, **rule) for f in (route.triton_route, route.route))
    assert torch.equal(found.ids_TK, want.ids_TK)

    def of(function: Any) -> Any:
        def call(logits: Tensor) -> Tensor:
            routed = function(logits, top_k, bias_E=bias, ids_TK=want.ids_TK, **rule)
            return torch.cat((routed.weights_TK, routed.scores_TE * 3), 1)

        return call

    exact, usual, ours = (
        _graded(of(function), logits.to(dtype))
        for function, dtype in (
            (route.route, torch.float64),
            (route.route, torch.float32),
            (route.triton_route, torch.float32),
        )
    )
    for index, (a, b, c) in enumerate(zip(ours, usual, exact, strict=True)):
        assert relative(a, c) <= max(2 * relative(b, c), 1e-6), index


def _graded(function: Any, logits: Tensor) -> list[Tensor]:
    leaf = logits.detach().requires_grad_()
    out = function(leaf)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to("cuda", out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaf, up)]


@pytest.mark.parametrize(("experts", "top_k"), [(64, 6), (128, 8), (160, 6), (32, 4), (5, 1)])
@pytest.mark.parametrize("load", ["random", "few", "all to one"])
def test_op_8_sort_by_expert(experts: int, top_k: int, load: str) -> None:
    generator = torch.Generator().manual_seed(experts)
    known = {"random": experts, "few": top_k + 1, "all to one": top_k}[load]
    ids = torch.rand(16385, min(known, experts), generator=generator).argsort(1)[:, :top_k].int().cuda()
    both = (sort_by_expert.triton_sort_by_expert, sort_by_expert.sort_by_expert)
    for ours, theirs in zip(*(f(experts - 1 - ids, experts) for f in both), strict=True):
        assert torch.equal(ours, theirs)
