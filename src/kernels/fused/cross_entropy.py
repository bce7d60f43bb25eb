"""Triton kernel of OP-3: from logits to loss and to the gradient, which takes the logits' place."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cross_entropy_kernel(
    logits_ptr, labels_ptr, scale_ptr, loss_ptr, row_stride,
    V: tl.constexpr, IGNORE: tl.constexpr, GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: online log-sum-exp, then (softmax - one-hot)·scale over the logits.

    A row without a label has loss 0 and gradient 0. Every lane keeps its own running maximum and sum, so that
    lanes meet once a row.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    label = tl.load(labels_ptr + row)
    is_target = label != IGNORE
    lanes = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(logits_ptr + start + lanes, mask=start + lanes < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, x)
        known = higher > float("-inf")
        total = tl.where(known, total * tl.exp(largest - higher) + tl.exp(x - higher), 0.0)
        largest = higher
    top = tl.max(largest, 0)
    lse = top + tl.log(tl.sum(tl.where(largest > float("-inf"), total * tl.exp(largest - top), 0.0), 0))
    picked = tl.load(logits_ptr + tl.where(is_target, label, 0)).to(tl.float32)
    tl.store(loss_ptr + row, tl.where(is_target, lse - picked, 0.0))
    if GRAD:
        factor = tl.where(is_target, tl.load(scale_ptr).to(tl.float32), 0.0)
        for start in range(0, V, BLOCK):
            at = start + lanes
            x = tl.load(logits_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32)
            share = tl.exp(x - lse) - tl.where(at == label, 1.0, 0.0)
            tl.store(logits_ptr + at, (share * factor).to(logits_ptr.dtype.element_ty), mask=at < V)
