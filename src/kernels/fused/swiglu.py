"""Triton kernels of OP-5: the gated activation and its gradient, one pass each."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def swiglu_kernel(gate_up_ptr, out_ptr, F, BLOCK: tl.constexpr):
    """silu(gate)·up of one row and one block of columns; arithmetic in fp32."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up_ptr + row * 2 * F + at, mask=at < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * F + F + at, mask=at < F, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * F + at, out.to(out_ptr.dtype.element_ty), mask=at < F)


@triton.jit
def swiglu_backward_kernel(gate_up_ptr, grad_ptr, out_ptr, F, BLOCK: tl.constexpr):
    """Gradients of gate and up, side by side as these are."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up_ptr + row * 2 * F + at, mask=at < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * F + F + at, mask=at < F, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * F + at, mask=at < F, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    dtype = out_ptr.dtype.element_ty
    into_gate = grad * up * share * (1.0 + gate * (1.0 - share))
    tl.store(out_ptr + row * 2 * F + at, into_gate.to(dtype), mask=at < F)
    tl.store(out_ptr + row * 2 * F + F + at, (grad * gate * share).to(dtype), mask=at < F)
