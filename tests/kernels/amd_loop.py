"""Compiles a loop of four loads for an AMD chip, which needs none: `python amd_loop.py STAGES`."""

from __future__ import annotations

import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def loop(q, k, v, m, out, n, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Attention without its softmax: what matters is four loads that are pipelined."""
    at = tl.arange(0, TILE)
    tile = at[:, None] * TILE + at[None, :]
    query, sums = tl.load(q + tile), tl.zeros((TILE, TILE), tl.float32)
    for i in range(0, n, TILE):
        key, value = tl.load(k + tile + i * TILE), tl.load(v + tile + i * TILE)
        scale, shift = tl.load(m + at + i), tl.load(out + TILE * TILE + at + i)
        scores = tl.dot(query, key) * scale[:, None] + shift[None, :]
        sums += tl.dot(scores.to(value.dtype), value)
    tl.store(out + tile, sums)


if __name__ == "__main__":
    types = {"q": "*bf16", "k": "*bf16", "v": "*bf16", "m": "*fp32", "out": "*fp32", "n": "i32"}
    source = ASTSource(fn=loop, signature={**types, "TILE": "constexpr"}, constexprs={"TILE": 32})
    options = {"num_stages": int(sys.argv[1]), "num_warps": 4}
    triton.compile(source, target=GPUTarget("hip", "gfx942", 64), options=options)
    print("compiled")
