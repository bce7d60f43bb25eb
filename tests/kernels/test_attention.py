"""OP-2, NUM-5: implementations agree with an fp64 loop; documents are apart, in values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from src.kernels import attention as module
from src.kernels.attention import attention, sdpa_cpu
from tests.models.tools import relative

H, C, U, SCALE = 6, 16, 7, 0.37
# Segments of length 1 included; they end inside and at the end of a sample.
LENGTHS = [5, 1, 17, 2, 1, 24]
Function = Callable[[Tensor, Tensor, Tensor, float, Tensor | None], tuple[Tensor, Tensor]]
BOTH = pytest.mark.parametrize("function", [attention, sdpa_cpu])
SHARED = pytest.mark.parametrize("groups", [H, 2, 1])
"""Heads of keys and values; each serves H/G query heads that follow one another."""


def documents() -> Tensor:
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS), dtype=torch.int32), torch.tensor(LENGTHS))
    return ids.view(2, 25)


def inputs(dtype: torch.dtype = torch.float32, groups: int = H) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((H, C), (groups, C), (groups, U))
    return [torch.randn(2, 25, *shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def oracle(q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """One query at a time, in fp64."""
    share = H // k.shape[2]
    out, lse = torch.zeros(2, 25, H, U, dtype=torch.float64), torch.zeros(2, H, 25, dtype=torch.float64)
    for b, i, h in ((b, i, h) for b in range(2) for i in range(25) for h in range(H)):
        keys = [j for j in range(i + 1) if ids is None or ids[b, i] == ids[b, j]]
        scores = SCALE * k[b, keys, h // share].double() @ q[b, i, h].double()
        lse[b, h, i] = scores.exp().sum().log()
        out[b, i, h] = (scores - lse[b, h, i]).exp() @ v[b, keys, h // share].double()
    return out, lse


@BOTH
@SHARED
@pytest.mark.parametrize("packed", [False, True])
def test_value_and_lse_equal_the_loop(function: Function, groups: int, packed: bool) -> None:
    ids = documents() if packed else None
    q, k, v = inputs(groups=groups)
    out, lse = function(q, k, v, SCALE, ids)
    want, want_lse = oracle(q.detach(), k.detach(), v.detach(), ids)
    assert relative(out.detach(), want) < 1e-6
    assert relative(lse, want_lse) < 1e-6
    assert not lse.requires_grad


@BOTH
@pytest.mark.parametrize("packed", [False, True])
def test_shared_heads_add_up_the_gradients_of_their_copies(function: Function, packed: bool) -> None:
    """OP-2, GQA: in values and gradients as if each query head had its own copy; fp64 is the reference's."""
    ids = documents() if packed else None
    shared = inputs(groups=2)
    weight = torch.randn(2, 25, H, U, generator=torch.Generator().manual_seed(2))
    out, _ = function(*shared, SCALE, ids)
    grads = torch.autograd.grad((out * weight).sum(), shared)
    double = [x.detach().double().requires_grad_() for x in shared]
    head = torch.tensor([0, 0, 0, 1, 1, 1])
    copies, _ = attention(double[0], *(x[:, :, head] for x in double[1:]), SCALE, ids)
    wanted = torch.autograd.grad((copies * weight).sum(), double)
    assert relative(out.detach(), copies.detach()) < 1e-6
    assert all(relative(grad, want) < 2e-6 for grad, want in zip(grads, wanted, strict=True))


def test_num_6_heads_dealt_out_in_turn_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Query head h reading head h mod G."""
    monkeypatch.setattr(module, "_shared", lambda x, heads: x.repeat(1, 1, heads // x.shape[2], 1))
    with pytest.raises(AssertionError):
        test_value_and_lse_equal_the_loop(attention, 2, False)


@BOTH
def test_num_5_packed_equals_separate_documents(function: Function) -> None:
    q, k, v = inputs()
    weight = torch.randn(2, 25, H, U, generator=torch.Generator().manual_seed(2))
    out, _ = function(q, k, v, SCALE, documents())
    grads = torch.autograd.grad((out * weight).sum(), (q, k, v))
    flat = [x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v)]
    parts = [function(*(x[None] for x in piece), SCALE, None)[0][0] for piece in pieces(flat)]
    apart = torch.autograd.grad((torch.cat(parts) * weight.flatten(0, 1)).sum(), flat)
    assert relative(out.detach().flatten(0, 1), torch.cat(parts).detach()) < 1e-6
    for grad, want in zip(grads, apart, strict=True):
        assert relative(grad.flatten(0, 1), want) < 2e-6


def pieces(flat: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """Per run of one document within one sample (a document here may span two samples' rows)."""
    ids, rows = documents().flatten(), torch.arange(50) // 25
    change = [0, *[i for i in range(1, 50) if ids[i] != ids[i - 1] or rows[i] != rows[i - 1]], 50]
    return [tuple(x[a:b] for x in flat) for a, b in pairwise(change)]


@BOTH
def test_num_5_other_documents_do_not_change_bitwise(function: Function) -> None:
    q, k, v = (x.detach() for x in inputs())
    before, _ = function(q, k, v, SCALE, documents())
    changed = documents() == 2
    for x in (q, k, v):
        x[changed] += 1e3
    after, _ = function(q, k, v, SCALE, documents())
    assert torch.equal(before[~changed], after[~changed])
    assert not torch.equal(before[changed], after[changed])


@BOTH
def test_bf16_is_as_near_as_bf16_can_be(function: Function) -> None:
    q, k, v = inputs(torch.bfloat16)
    out, lse = function(q, k, v, SCALE, documents())
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert relative(out.detach(), oracle(q.detach(), k.detach(), v.detach(), documents())[0]) < 1e-2


def test_num_6_ignoring_documents_is_noticed() -> None:
    q, k, v = inputs()
    out, _ = sdpa_cpu(q, k, v, SCALE, None)
    assert relative(out.detach(), oracle(q.detach(), k.detach(), v.detach(), documents())[0]) > 1e-2
