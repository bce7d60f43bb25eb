"""Triton kernels of OP-10: a norm over rows, onto a residual first, and the gradients; all in fp32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, gain_ptr, y_ptr, total_ptr, rows, x_stride, eps,
    JOINED: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`ROWS` rows a program; with a residual the sum is rounded and stored, and its rounded value normed."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, BLOCK)[None]
    inside = (row < rows) & (at < D)
    x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if JOINED:
        x += tl.load(residual_ptr + row * D + at, mask=inside, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * D + at, total, mask=inside)
        x = total.to(tl.float32)
    gain = tl.load(gain_ptr + at, mask=at < D, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    tl.store(y_ptr + row * D + at, (x * rstd * gain).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward_kernel(
    dy_ptr, x_ptr, gain_ptr, dtotal_ptr, dx_ptr, parts_ptr, rows, x_stride, eps, JOINED: tl.constexpr,
    D: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`STEPS` times `ROWS` rows a program, and its part of the gain's gradient.

    With x̂ = x·rstd and y = x̂·g: dg = Σ dy·x̂, dx = rstd·(dy·g - x̂·mean(dy·g·x̂)).
    """
    at = tl.arange(0, BLOCK)[None]
    gain = tl.load(gain_ptr + at, mask=at < D, other=0.0).to(tl.float32)
    dgain = tl.zeros((ROWS, BLOCK), tl.float32)
    for step in range(STEPS):
        row = (tl.program_id(0).to(tl.int64) * STEPS + step) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (at < D)
        x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * D + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = x * rstd
        dgain += dy * x
        dy = dy * gain
        dx = rstd * (dy - x * (tl.sum(dy * x, 1) / D)[:, None])
        if JOINED:
            dx += tl.load(dtotal_ptr + row * D + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * D + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    lanes = tl.arange(0, BLOCK)
    part = parts_ptr + tl.program_id(0).to(tl.int64) * D + lanes
    tl.store(part, tl.sum(dgain, 0), mask=lanes < D)
