"""The sum of squares of many tensors, for the norm of all gradients (OP-4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from src.kernels.blocks import power_of_two
from src.kernels.declaration import EAGER, Implementation

CHUNK, BLOCK = 65536, 4096
"""Elements of a program, and those that it looks at together."""


def square_sum(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Σ x² over all elements of `tensors`, one at least, as a scalar of `dtype` on their device."""
    norms = torch.stack([torch.linalg.vector_norm(tensor, dtype=dtype) for tensor in tensors])
    return norms.square().sum()


def triton_square_sum(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """`square_sum` in a launch for all tensors of a dtype and one for all sums of chunks, in fixed order.

    A table of addresses goes to the device, so that a hundred tensors are not a hundred launches, most of
    them of a few microseconds. Sums are fp32.
    """
    from src.kernels.fused.grad_norm import grad_norm_chunks_kernel, grad_norm_total_kernel

    groups: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
    for tensor in (t.contiguous() for t in tensors if t.numel()):
        groups.setdefault((tensor.dtype, _is_aligned(tensor)), []).append(tensor)
    counts = [sum(map(_chunks, group)) for group in groups.values()]
    device = tensors[0].device
    sums, total = torch.empty(sum(counts), device=device), torch.empty((), device=device)
    at = 0
    for (key, group), count in zip(groups.items(), counts, strict=True):
        grad_norm_chunks_kernel[(count,)](
            _table(group), group[0], sums[at:], TENSORS=power_of_two(len(group)), ALIGNED=key[1], CHUNK=CHUNK,
            BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        at += count
    grad_norm_total_kernel[(1,)](sums, total, COUNT=at, BLOCK=BLOCK, num_warps=8)
    return total.to(dtype)


def _is_aligned(tensor: Tensor) -> bool:
    """Whether 16 bytes may be read at a time from the first to the last."""
    return tensor.data_ptr() % 16 == 0 and tensor.numel() % 16 == 0


def _chunks(tensor: Tensor) -> int:
    return (tensor.numel() + CHUNK - 1) // CHUNK


def _table(tensors: Sequence[Tensor]) -> Tensor:
    """int64 [3, a power of two]: first chunk, address and elements; beyond the tensors nothing begins."""
    firsts = [0]
    for tensor in tensors:
        firsts.append(firsts[-1] + _chunks(tensor))
    rest = power_of_two(len(tensors)) - len(tensors)
    columns = [(f, t.data_ptr(), t.numel()) for f, t in zip(firsts, tensors, strict=False)]
    table = torch.tensor(columns + [(firsts[-1], 0, 0)] * rest, dtype=torch.int64).T.contiguous()
    if tensors[0].device.type == "cuda":  # From memory that is not pinned a copy waits for the step before.
        table = table.pin_memory().to(tensors[0].device, non_blocking=True)
    return table


IMPLEMENTATIONS = (
    Implementation("grad_norm", EAGER, square_sum, deterministic=(True, True), saves="nothing"),
    Implementation(
        "grad_norm",
        "triton",
        triton_square_sum,
        deterministic=(True, True),
        saves="nothing",
        source="triton",
        devices=frozenset({"cuda", "rocm"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    ),
)
