"""Triton kernel of OP-4: one pass over parameter, gradient and moments."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adamw_kernel(
    p_ptr, g_ptr, m_ptr, v_ptr, other_ptr, step_ptr, clip_ptr, skip_ptr, n, lr, decay, eps,
    BETA1: tl.constexpr, BETA2: tl.constexpr, LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr,
    HAS_CLIP: tl.constexpr, HAS_COPY: tl.constexpr, HAS_LOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `adamw`. All arithmetic is fp32; bias corrections are fp64, since 1 - β^t cancels.

    `other` is the copy of a whole parameter, or the lower half of one whose upper half is `p`.
    """
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
        if HAS_LOW:
            high = tl.load(p_ptr + at, mask=inside, other=0).to(tl.int32)
            low = tl.load(other_ptr + at, mask=inside, other=0).to(tl.int32) & 0xFFFF
            p = join_halves(high, low)
        else:
            p = tl.load(p_ptr + at, mask=inside, other=0.0).to(tl.float32)
        m = m * BETA1 + g * (1.0 - BETA1)
        v = v * BETA2 + g * g * (1.0 - BETA2)
        p = p * (1.0 - lr * decay) - rate * m / (tl.sqrt(v) / root + eps)
        tl.store(m_ptr + at, m.to(m_ptr.dtype.element_ty), mask=inside)
        tl.store(v_ptr + at, v.to(v_ptr.dtype.element_ty), mask=inside)
        if HAS_LOW:
            bits = tl.where(p == p, p.to(tl.int32, bitcast=True), 0x7FC00000)  # See `halves.NAN`.
            tl.store(p_ptr + at, ((bits + 0x8000) >> 16).to(tl.int16), mask=inside)
            tl.store(other_ptr + at, bits.to(tl.int16), mask=inside)
        else:
            tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=inside)
        if HAS_COPY:
            tl.store(other_ptr + at, p.to(other_ptr.dtype.element_ty), mask=inside)


@triton.jit
def join_halves(high, low):
    """The fp32 numbers of two halves as int32, the lower one from 0 to 0xFFFF; as `halves.join`."""
    return (((high - (low >> 15)) << 16) | low).to(tl.float32, bitcast=True)
