"""Triton kernels of OP-11 for grouped-query attention: norm and rotation of heads, and gradients back."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate_kernel(
    x_ptr, out_ptr, cos_ptr, sin_ptr, gain_ptr, eps, NORMED: tl.constexpr,
    H: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """One token a program: the halves (a, b) of each head become (a·cos - b·sin, a·sin + b·cos), in fp32."""
    token = tl.program_id(0).to(tl.int64)
    h, c = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_HALF)[None]
    inside = (h < H) & (c < HALF)
    at = (token * H + h) * (2 * HALF) + c
    a = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        rstd = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        a = a * rstd * tl.load(gain_ptr + c, mask=c < HALF, other=0.0).to(tl.float32)
        b = b * rstd * tl.load(gain_ptr + HALF + c, mask=c < HALF, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * HALF + c, mask=c < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * HALF + c, mask=c < HALF, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + at + HALF, (a * sin + b * cos).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rotate_back_kernel(
    dy_ptr, x_ptr, dx_ptr, cos_ptr, sin_ptr, gain_ptr, parts_ptr, eps, tokens, TOKENS: tl.constexpr,
    H: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Gradient of norm and rotation for `TOKENS` tokens a program, and their part of the gain's gradient.

    With y = R(x̂·g) and x̂ = x·rstd: n = Rᵀ·dy, dg = Σ n·x̂, dx = rstd·(n·g - x̂·mean(n·g·x̂)).
    """
    h, c = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_HALF)[None]
    is_c, inside = c < HALF, (h < H) & (c < HALF)
    gain_a = tl.load(gain_ptr + c, mask=is_c, other=0.0).to(tl.float32)
    gain_b = tl.load(gain_ptr + HALF + c, mask=is_c, other=0.0).to(tl.float32)
    sum_a = tl.zeros((BLOCK_HALF,), tl.float32)
    sum_b = tl.zeros((BLOCK_HALF,), tl.float32)
    for index in range(TOKENS):
        token = tl.program_id(0).to(tl.int64) * TOKENS + index
        here, there = inside & (token < tokens), is_c & (token < tokens)
        at = (token * H + h) * (2 * HALF) + c
        a = tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + at + HALF, mask=here, other=0.0).to(tl.float32)
        da = tl.load(dy_ptr + at, mask=here, other=0.0).to(tl.float32)
        db = tl.load(dy_ptr + at + HALF, mask=here, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + token * HALF + c, mask=there, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + token * HALF + c, mask=there, other=0.0).to(tl.float32)
        rstd = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        a, b = a * rstd, b * rstd
        na, nb = da * cos + db * sin, db * cos - da * sin
        sum_a += tl.sum(na * a, 0)
        sum_b += tl.sum(nb * b, 0)
        na, nb = na * gain_a, nb * gain_b
        mean = ((tl.sum(na * a, 1) + tl.sum(nb * b, 1)) / (2 * HALF))[:, None]
        tl.store(dx_ptr + at, (rstd * (na - a * mean)).to(dx_ptr.dtype.element_ty), mask=here)
        tl.store(dx_ptr + at + HALF, (rstd * (nb - b * mean)).to(dx_ptr.dtype.element_ty), mask=here)
    lanes = tl.arange(0, BLOCK_HALF)
    part = parts_ptr + tl.program_id(0).to(tl.int64) * (2 * HALF) + lanes
    tl.store(part, sum_a, mask=lanes < HALF)
    tl.store(part + HALF, sum_b, mask=lanes < HALF)
