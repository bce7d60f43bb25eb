"""NUM-7: a mixture's own kernels on a GPU, at the widths of models (NUM-2, NUM-3)."""

from __future__ import annotations

import pytest
import torch

from src.kernels import combine, expert_bias, permute, rms_norm
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
