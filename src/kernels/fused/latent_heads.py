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
    r = tl.arange(0, 2 * BLOCK_P)[None]
    is_n, is_r, is_u = (h < H) & (n < NOPE), (h < H) & (r < ROPE), (h < H) & (u < VALUE)
    cos = tl.load(cos_ptr + token * (ROPE // 2) + p, mask=p < ROPE // 2, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * (ROPE // 2) + p, mask=p < ROPE // 2, other=0.0).to(tl.float32)
    dtype = q_out.dtype.element_ty

    q = token * H * key + h * key
    tl.store(q_out + q + n, tl.load(q_in + q + n, mask=is_n), mask=is_n)
    pairs = tl.load(q_in + q + NOPE + r, mask=is_r, other=0.0).to(tl.float32)
    x, y = tl.split(tl.reshape(pairs, (BLOCK_H, BLOCK_P, 2)))
    turned = tl.reshape(tl.join(x * cos - y * sin, x * sin + y * cos), (BLOCK_H, 2 * BLOCK_P))
    tl.store(q_out + q + NOPE + r, turned.to(dtype), mask=is_r)

    kv = token * H * (NOPE + VALUE) + h * (NOPE + VALUE)
    tl.store(k_out + q + n, tl.load(kv_in + kv + n, mask=is_n), mask=is_n)
    tl.store(v_out + token * H * VALUE + h * VALUE + u, tl.load(kv_in + kv + NOPE + u, mask=is_u), mask=is_u)
    pairs = tl.load(k_rope_in + token * k_rope_stride + r, mask=r < ROPE, other=0.0).to(tl.float32)
    x, y = tl.split(tl.reshape(pairs, (1, BLOCK_P, 2)))
    turned = tl.reshape(tl.join(x * cos - y * sin, x * sin + y * cos), (1, 2 * BLOCK_P))
    everywhere = tl.broadcast_to(turned.to(dtype), (BLOCK_H, 2 * BLOCK_P))
    tl.store(k_out + q + NOPE + r, everywhere, mask=is_r)


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
    r = tl.arange(0, 2 * BLOCK_P)[None]
    is_n, is_r, is_u = (h < H) & (n < NOPE), (h < H) & (r < ROPE), (h < H) & (u < VALUE)
    cos = tl.load(cos_ptr + token * (ROPE // 2) + p, mask=p < ROPE // 2, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * (ROPE // 2) + p, mask=p < ROPE // 2, other=0.0).to(tl.float32)
    dtype = dq_in.dtype.element_ty

    q = token * H * key + h * key
    tl.store(dq_in + q + n, tl.load(dq_ptr + q + n, mask=is_n), mask=is_n)
    pairs = tl.load(dq_ptr + q + NOPE + r, mask=is_r, other=0.0).to(tl.float32)
    x, y = tl.split(tl.reshape(pairs, (BLOCK_H, BLOCK_P, 2)))
    back = tl.reshape(tl.join(x * cos + y * sin, y * cos - x * sin), (BLOCK_H, 2 * BLOCK_P))
    tl.store(dq_in + q + NOPE + r, back.to(dtype), mask=is_r)

    kv = token * H * (NOPE + VALUE) + h * (NOPE + VALUE)
    tl.store(dkv_in + kv + n, tl.load(dk_ptr + q + n, mask=is_n), mask=is_n)
    v = tl.load(dv_ptr + token * H * VALUE + h * VALUE + u, mask=is_u)
    tl.store(dkv_in + kv + NOPE + u, v, mask=is_u)
    summed = tl.sum(tl.load(dk_ptr + q + NOPE + r, mask=is_r, other=0.0).to(tl.float32), 0)
    x, y = tl.split(tl.reshape(summed, (1, BLOCK_P, 2)))
    back = tl.reshape(tl.join(x * cos + y * sin, y * cos - x * sin), (1, 2 * BLOCK_P))
    tl.store(dk_rope + token * ROPE + r, back.to(dtype), mask=r < ROPE)
