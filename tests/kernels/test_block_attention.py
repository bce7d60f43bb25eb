"""ENG-21: attention over blocks of keys, merged, is attention over all of them; so is its gradient."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from src.kernels.attention import attention
from src.kernels.block_attention import block_attention, block_attention_backward
from tests.models.tools import relative

B, S, H, G, C, U, SCALE = 2, 11, 6, 2, 8, 5, 0.4
CUTS = (0, 4, 5, 11)
"""Ends of three blocks of keys, one of a single key."""


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the result."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((B, S, H, C), (B, S, G, C), (B, S, G, U), (B, S, H, U))
    q, k, v, do = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return q, k, v, do


def documents() -> Tensor:
    return torch.tensor([[0] * 6 + [1] * 5, [2] * 2 + [3] + [4] * 8], dtype=torch.int32)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-13), (torch.bfloat16, 6e-3)])
def test_blocks_add_up(dtype: torch.dtype, limit: float) -> None:
    """Results add up by weights exp(lse of the block - lse of all), gradients as they are; fp32 at least."""
    q, k, v, do = inputs(dtype)
    leaves = [x.double().clone().requires_grad_() for x in (q, k, v)]
    want, want_lse = attention(*leaves, SCALE, documents())
    want.backward(do.double())
    ids, places = documents(), torch.arange(S)
    allowed = (places[:, None] >= places) & (ids[:, :, None] == ids[:, None])
    parts = [slice(a, b) for a, b in pairwise(CUTS)]
    found = [block_attention(q, k[:, p], v[:, p], SCALE, allowed[..., p]) for p in parts]
    lse = torch.stack([lse for _, lse in found]).logsumexp(0)
    out = sum(o * (part - lse).exp().transpose(1, 2)[..., None] for o, part in found)
    assert out.dtype == lse.dtype == torch.promote_types(dtype, torch.float32)
    assert relative(out, want.detach()) < limit
    assert relative(lse, want_lse) < limit
    delta = (do.to(out.dtype) * out).sum(-1).transpose(1, 2)
    grads = [
        block_attention_backward(do, delta, q, k[:, p], v[:, p], lse, SCALE, allowed[..., p]) for p in parts
    ]
    dq = sum(g[0] for g in grads)
    dk, dv = (torch.cat([g[i] for g in grads], 1) for i in (1, 2))
    for x, leaf in zip((dq, dk, dv), leaves, strict=True):
        assert x.dtype == out.dtype
        assert leaf.grad is not None
        assert relative(x, leaf.grad) < limit


def test_a_query_without_keys_gets_nothing() -> None:
    """No key to see: o = 0 and lse = -inf, so that the block has no weight in the merge."""
    q, k, v, _ = inputs(torch.float64)
    allowed = torch.ones(1, S, S, dtype=torch.bool)
    allowed[:, 3] = False
    out, lse = block_attention(q, k, v, SCALE, allowed)
    assert not out[:, 3].any()
    assert bool((lse[..., 3] == -torch.inf).all())
    assert bool(lse[..., :3].isfinite().all())
    assert bool(out.isfinite().all())
