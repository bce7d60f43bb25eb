"""Triton kernels of OP-5: the gated activation and its gradient, one pass each; arithmetic in fp32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _parts(gate_up_ptr, row, at, F, limit, alpha, CLAMPED: tl.constexpr):
    """Gate and up as they are, then the gate within its bound, σ(alpha·gate), and what multiplies both.

    Comparisons, not `minimum`: that would take the bound where the gate is NaN.
    """
    gate = tl.load(gate_up_ptr + row * 2 * F + at, mask=at < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * F + F + at, mask=at < F, other=0.0).to(tl.float32)
    bounded, factor = gate, up
    if CLAMPED:
        bounded = tl.where(gate > limit, limit, gate)
        factor = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
    return gate, up, bounded, tl.sigmoid(alpha * bounded), factor


@triton.jit
def swiglu_kernel(gate_up_ptr, out_ptr, F, limit, alpha, CLAMPED: tl.constexpr, BLOCK: tl.constexpr):
    """gate·σ(alpha·gate)·up of one row and one block of columns, or the clamped kind."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _, _, gate, share, factor = _parts(gate_up_ptr, row, at, F, limit, alpha, CLAMPED)
    out = gate * share * factor
    tl.store(out_ptr + row * F + at, out.to(out_ptr.dtype.element_ty), mask=at < F)


@triton.jit
def swiglu_backward_kernel(
    gate_up_ptr, grad_ptr, out_ptr, F, limit, alpha, CLAMPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of gate and up, side by side as these are; zero beyond a bound."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    raw, up, gate, share, factor = _parts(gate_up_ptr, row, at, F, limit, alpha, CLAMPED)
    grad = tl.load(grad_ptr + row * F + at, mask=at < F, other=0.0).to(tl.float32)
    into_gate = grad * factor * share * (1.0 + alpha * gate * (1.0 - share))
    into_up = grad * gate * share
    if CLAMPED:
        into_gate = tl.where(raw > limit, 0.0, into_gate)
        into_up = tl.where((up > limit) | (up < -limit), 0.0, into_up)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + row * 2 * F + at, into_gate.to(dtype), mask=at < F)
    tl.store(out_ptr + row * 2 * F + F + at, into_up.to(dtype), mask=at < F)
