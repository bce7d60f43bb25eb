"""Triton kernels of OP-11 for latent attention: heads from projections, and gradients back, one pass each."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def heads_kernel(
    q_in, kv_in, k_rope_in, k_rope_stride, cos_ptr, sin_ptr, q_out, k_out, v_out,
    H: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One token a program. Pairs (x0,x1), (x2,x3), … turn in fp32; everything else is copied."""
    token = tl.program_id(0).to(tl.int64)
    key: tl.constexpr = NOPE + ROPE
    h = tl.arange(0, BLOCK_H)[:, None]
    n, p, u = tl.arange(0, BLOCK_N)[None], tl.arange(0, BLOCK_P)[None], tl.arange(0, BLOCK_V)[None]
    is_n, is_p, is_u = (h < H) & (n < NOPE), (h < H) & (p < ROPE // 2), (h < H) & (u < VALUE)
    cos = tl.load(cos_ptr + token * (ROPE // 2) + p, mask=p < ROPE // 2, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * (ROPE // 2) + p, mask=p < ROPE // 2, other=0.0).to(tl.float32)
    dtype = q_out.dtype.element_ty

    q = token * H * key + h * key
    tl.store(q_out + q + n, tl.load(q_in + q + n, mask=is_n), mask=is_n)
    x = tl.load(q_in + q + NOPE + 2 * p, mask=is_p, other=0.0).to(tl.float32)
    y = tl.load(q_in + q + NOPE + 2 * p + 1, mask=is_p, other=0.0).to(tl.float32)
    tl.store(q_out + q + NOPE + 2 * p, (x * cos - y * sin).to(dtype), mask=is_p)
    tl.store(q_out + q + NOPE + 2 * p + 1, (x * sin + y * cos).to(dtype), mask=is_p)

    kv = token * H * (NOPE + VALUE) + h * (NOPE + VALUE)
    tl.store(k_out + q + n, tl.load(kv_in + kv + n, mask=is_n), mask=is_n)
    tl.store(v_out + token * H * VALUE + h * VALUE + u, tl.load(kv_in + kv + NOPE + u, mask=is_u), mask=is_u)
    shared = k_rope_in + token * k_rope_stride + 2 * p
    x = tl.load(shared, mask=p < ROPE // 2, other=0.0).to(tl.float32)
    y = tl.load(shared + 1, mask=p < ROPE // 2, other=0.0).to(tl.float32)
    zero = tl.zeros((BLOCK_H, BLOCK_P), tl.float32)
    tl.store(k_out + q + NOPE + 2 * p, (x * cos - y * sin + zero).to(dtype), mask=is_p)
    tl.store(k_out + q + NOPE + 2 * p + 1, (x * sin + y * cos + zero).to(dtype), mask=is_p)


@triton.jit
def heads_backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr, dq_in, dkv_in, dk_rope,
    H: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One token a program. Pairs turn back; the shared key's gradient is summed over heads in fp32."""
    token = tl.program_id(0).to(tl.int64)
    key: tl.constexpr = NOPE + ROPE
    h = tl.arange(0, BLOCK_H)[:, None]
    n, p, u = tl.arange(0, BLOCK_N)[None], tl.arange(0, BLOCK_P)[None], tl.arange(0, BLOCK_V)[None]
    is_n, is_p, is_u = (h < H) & (n < NOPE), (h < H) & (p < ROPE // 2), (h < H) & (u < VALUE)
    cos = tl.load(cos_ptr + token * (ROPE // 2) + p, mask=p < ROPE // 2, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * (ROPE // 2) + p, mask=p < ROPE // 2, other=0.0).to(tl.float32)
    dtype = dq_in.dtype.element_ty

    q = token * H * key + h * key
    tl.store(dq_in + q + n, tl.load(dq_ptr + q + n, mask=is_n), mask=is_n)
    x = tl.load(dq_ptr + q + NOPE + 2 * p, mask=is_p, other=0.0).to(tl.float32)
    y = tl.load(dq_ptr + q + NOPE + 2 * p + 1, mask=is_p, other=0.0).to(tl.float32)
    tl.store(dq_in + q + NOPE + 2 * p, (x * cos + y * sin).to(dtype), mask=is_p)
    tl.store(dq_in + q + NOPE + 2 * p + 1, (y * cos - x * sin).to(dtype), mask=is_p)

    kv = token * H * (NOPE + VALUE) + h * (NOPE + VALUE)
    tl.store(dkv_in + kv + n, tl.load(dk_ptr + q + n, mask=is_n), mask=is_n)
    v = tl.load(dv_ptr + token * H * VALUE + h * VALUE + u, mask=is_u)
    tl.store(dkv_in + kv + NOPE + u, v, mask=is_u)
    x = tl.sum(tl.load(dk_ptr + q + NOPE + 2 * p, mask=is_p, other=0.0).to(tl.float32), 0)[None]
    y = tl.sum(tl.load(dk_ptr + q + NOPE + 2 * p + 1, mask=is_p, other=0.0).to(tl.float32), 0)[None]
    tl.store(dk_rope + token * ROPE + 2 * p, (x * cos + y * sin).to(dtype), mask=p < ROPE // 2)
    tl.store(dk_rope + token * ROPE + 2 * p + 1, (y * cos - x * sin).to(dtype), mask=p < ROPE // 2)
