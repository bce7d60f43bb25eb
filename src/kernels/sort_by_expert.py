"""Order of the routed rows by expert (OP-8)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from src.kernels.blocks import power_of_two
from src.kernels.declaration import EAGER, Implementation
from src.kernels.opaque import opaque

ELEMENTS = 8192
"""Slots times experts of the tile that one program holds."""


class Order(NamedTuple):
    """A bijection between slots (token t's k-th choice is slot t·K + k) and rows grouped by expert."""

    row_slot_N: Tensor
    """int32, the slot that a row holds."""
    slot_row_N: Tensor
    """int32, the row of a slot: the inverse of `row_slot_N`."""
    offs_E: Tensor
    """int32, end of each expert's rows."""


def sort_by_expert(ids_TK: Tensor, experts: int) -> Order:
    """Rows by (expert, token, k): a stable sort, so the order is one and the same in every run."""
    sorted_N, row_slot_N = ids_TK.flatten().sort(stable=True)
    slots_N = torch.arange(row_slot_N.numel(), dtype=torch.int32, device=ids_TK.device)
    slot_row_N = torch.empty_like(slots_N).scatter(0, row_slot_N, slots_N)
    all_E = torch.arange(experts, dtype=sorted_N.dtype, device=ids_TK.device)
    offs_E = torch.searchsorted(sorted_N, all_E, right=True, out_int32=True)
    return Order(row_slot_N.to(torch.int32), slot_row_N, offs_E)


def _sort(ids_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    from src.kernels.fused.sort_by_expert import sort_count_kernel, sort_place_kernel

    ids_TK, found = ids_TK.contiguous(), _sort_shapes(ids_TK, experts)
    slots, block = ids_TK.numel(), power_of_two(experts)
    if not slots:
        return *found[:2], found[2].zero_()
    sizes = {"E": experts, "TILE": max(16, ELEMENTS // block), "BLOCK_E": block, "num_warps": 8}
    tiles = -(-slots // sizes["TILE"])
    counts_EP = ids_TK.new_empty(experts, tiles, dtype=torch.int32)
    sort_count_kernel[(tiles,)](ids_TK, counts_EP, slots, tiles, **sizes)
    sums_N = counts_EP.flatten().cumsum(0, dtype=torch.int32)
    sort_place_kernel[(tiles,)](ids_TK, sums_N, *found, slots, tiles, **sizes)
    return found


def _sort_shapes(ids_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    row_slot_N, slot_row_N = (ids_TK.new_empty(ids_TK.numel(), dtype=torch.int32) for _ in range(2))
    return row_slot_N, slot_row_N, ids_TK.new_empty(experts, dtype=torch.int32)


_sorted = opaque(
    "sort_by_expert", "(Tensor ids, int experts) -> (Tensor, Tensor, Tensor)", _sort, _sort_shapes
)


def triton_sort_by_expert(ids_TK: Tensor, experts: int) -> Order:
    """`sort_by_expert` by counting: tiles of slots count, a running sum over all, tiles place their slots."""
    return Order(*_sorted(ids_TK, experts))


IMPLEMENTATIONS = (
    Implementation("sort_by_expert", EAGER, sort_by_expert, deterministic=(True, True), saves="nothing"),
    Implementation(
        "sort_by_expert",
        "triton",
        triton_sort_by_expert,
        source="triton",
        deterministic=(True, True),
        saves="nothing",
        devices=frozenset({"cuda", "rocm"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    ),
)
