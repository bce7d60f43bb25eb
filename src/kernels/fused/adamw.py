"""Triton kernel of OP-4: one pass over parameter, gradient and moments."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adamw_kernel(
    p_ptr, g_ptr, m_ptr, v_ptr, copy_ptr, step_ptr, clip_ptr, skip_ptr, n, lr, decay, eps,
    BETA1: tl.constexpr, BETA2: tl.constexpr, LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr,
    HAS_CLIP: tl.constexpr, HAS_COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `adamw`. All arithmetic is fp32; bias corrections are fp64, since 1 - β^t cancels."""
    if tl.load(skip_ptr) == 0.0:
        step = tl.load(step_ptr).to(tl.float64) + 1.0
        rate = lr / (1.0 - tl.exp(step * LOG_BETA1)).to(tl.float32)
        root = tl.sqrt((1.0 - tl.exp(step * LOG_BETA2)).to(tl.float32))
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_CLIP:
            g = g * tl.load(clip_ptr).to(tl.float32)
        m = tl.load(m_ptr + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at, mask=inside, other=0.0).to(tl.float32)
        p = tl.load(p_ptr + at, mask=inside, other=0.0).to(tl.float32)
        m = m * BETA1 + g * (1.0 - BETA1)
        v = v * BETA2 + g * g * (1.0 - BETA2)
        p = p * (1.0 - lr * decay) - rate * m / (tl.sqrt(v) / root + eps)
        tl.store(m_ptr + at, m.to(m_ptr.dtype.element_ty), mask=inside)
        tl.store(v_ptr + at, v.to(v_ptr.dtype.element_ty), mask=inside)
        tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=inside)
        if HAS_COPY:
            tl.store(copy_ptr + at, p.to(copy_ptr.dtype.element_ty), mask=inside)
