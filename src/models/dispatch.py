"""Stages 2 and 4 where one rank holds all experts: a sort and two copies, no communication."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from src.kernels.registry import Ops
from src.kernels.sort_by_expert import Order


class LocalPlan(NamedTuple):
    """What `combine` must know of `dispatch`."""

    row_slot_N: Tensor
    slot_row_N: Tensor
    top_k: int


class LocalDispatcher:
    """The dispatcher for ep = 1 (protocol.Dispatcher); issues no host synchronisation."""

    def __init__(self, experts: int, ops: Ops) -> None:
        self.experts = experts
        self.ops = ops

    def order(self, ids_TK: Tensor) -> Order:
        """See `protocol.Dispatcher`."""
        order: Order = self.ops.sort_by_expert(ids_TK, self.experts)
        return order

    def dispatch(self, tokens_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor, LocalPlan]:
        """Rows [T·K,D] by (expert, token), int32 counts [E], the plan."""
        order = self.order(ids_TK)
        plan = LocalPlan(order.row_slot_N, order.slot_row_N, ids_TK.shape[1])
        counts_E = order.offs_E.diff(prepend=order.offs_E.new_zeros(1))
        return self.dispatch_again(tokens_TD, plan), counts_E, plan

    def dispatch_again(self, tokens_TD: Tensor, plan: LocalPlan) -> Tensor:
        """Rows [T·K,D] as before."""
        rows_ND: Tensor = self.ops.permute(tokens_TD, *plan)
        return rows_ND

    def combine(self, rows_RD: Tensor, plan: LocalPlan) -> Tensor:
        """Rows [T,K,D] in the order of the tokens."""
        rows_TKD: Tensor = self.ops.unpermute(rows_RD, *plan)
        return rows_TKD
