"""OP-5, OP-9, OP-10, OP-11: formulas against independent ones, and the precision each keeps."""

from __future__ import annotations

import cmath
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from src.kernels.rms_norm import rms_norm
from src.kernels.rope import real_rope, rope
from src.kernels.router_linear import router_linear
from src.kernels.swiglu import swiglu
from tests.models.tools import relative


def test_mod_6_rms_norm_has_eps_inside_the_root_and_rounds_once() -> None:
    x, w = torch.randn(9, 7) * 0.01, torch.randn(7)
    want = F.rms_norm(x.double(), (7,), w.double(), 1e-3)
    assert relative(rms_norm(x, w, 1e-3)[0], want) < 1e-6
    half, _ = rms_norm(x.bfloat16(), w, 1e-3)
    assert half.dtype == torch.bfloat16
    exact = F.rms_norm(x.bfloat16().double(), (7,), w.double(), 1e-3)
    assert torch.equal(half, exact.bfloat16()) or relative(half, exact) < 2**-9


def test_ffn_1_the_gate_is_the_first_half() -> None:
    gate, up = torch.tensor([[1.0, -2.0, 0.5]]), torch.tensor([[3.0, 5.0, -7.0]])
    want = gate * torch.sigmoid(gate) * up
    assert torch.allclose(swiglu(torch.cat((gate, up), -1)), want)
    assert not torch.allclose(swiglu(torch.cat((up, gate), -1)), want)


def test_ffn_1_gate_and_up_within_bounds() -> None:
    """(u+1)·g·σ(αg) with g ≤ L and |u| ≤ L, and its derivatives in closed form, each 0 beyond its bound."""
    limit, alpha = 0.8, 1.702
    gate, up = torch.randn(2, 50, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = torch.cat((gate, up), -1).requires_grad_()
    out = swiglu(whole, limit=limit, alpha=alpha)
    (grad,) = torch.autograd.grad(out.sum(), whole)
    g, u = gate.clip(max=limit), up.clip(-limit, limit)
    s = 1 / (1 + torch.exp(-alpha * g))
    assert torch.allclose(out, (u + 1) * g * s, rtol=1e-14)
    into_gate = (u + 1) * s * (1 + alpha * g * (1 - s)) * (gate <= limit)
    assert torch.allclose(grad, torch.cat((into_gate, g * s * (up.abs() <= limit)), -1), rtol=1e-13)
    assert all(bool(mask.any()) for mask in (gate > limit, up > limit, up < -limit, gate < -limit))


@pytest.mark.parametrize("function", [rope, real_rope])
@pytest.mark.parametrize("interleaved", [True, False])
def test_att_2_rope_rotates_neighbours_or_halves(function: Any, interleaved: bool) -> None:
    """One complex number at a time, with Python's own arithmetic."""
    x = torch.randn(1, 4, 2, 6, dtype=torch.float64)
    angles = torch.randn(1, 4, 3, dtype=torch.float64)
    found = function(x, angles.cos(), angles.sin(), interleaved=interleaved)
    for s, h, pair in ((s, h, p) for s in range(4) for h in range(2) for p in range(3)):
        places = [2 * pair, 2 * pair + 1] if interleaved else [pair, pair + 3]
        z = complex(*x[0, s, h, places].tolist()) * cmath.exp(1j * angles[0, s, pair].item())
        assert found[0, s, h, places].tolist() == pytest.approx([z.real, z.imag], rel=1e-12)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_keeps_the_dtype_of_x(interleaved: bool) -> None:
    x, angles = torch.randn(1, 4, 2, 6), torch.randn(1, 4, 3)
    half = rope(x.bfloat16(), angles.cos(), angles.sin(), interleaved=interleaved)
    assert half.dtype == torch.bfloat16
    wide = (x.bfloat16().double(), angles.cos().double(), angles.sin().double())
    assert relative(half, rope(*wide, interleaved=interleaved)) < 2**-8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_mod_4_router_logits_are_at_least_fp32(dtype: torch.dtype) -> None:
    x, w = torch.randn(9, 64).to(dtype), torch.randn(5, 64).to(dtype)
    logits = router_linear(x, w)
    assert logits.dtype == torch.promote_types(dtype, torch.float32)
    assert relative(logits, x.double() @ w.double().T) < 1e-6


def test_rope_takes_views_at_odd_addresses() -> None:
    """A latent of odd width lies before the key that is rotated."""
    whole, angles = torch.randn(1, 4, 2, 11), torch.randn(1, 4, 3)
    found = rope(whole[..., 5:], angles.cos(), angles.sin(), interleaved=True)
    alone = whole[..., 5:].contiguous()
    assert torch.equal(found, rope(alone, angles.cos(), angles.sin(), interleaved=True))
