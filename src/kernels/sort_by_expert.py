"""Order of the routed rows by expert (OP-8)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from src.kernels.declaration import EAGER, Implementation


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


IMPLEMENTATIONS = (
    Implementation("sort_by_expert", EAGER, sort_by_expert, deterministic=(True, True), saves="nothing"),
)
