"""Stages 2 and 4 where one rank holds all experts: a sort and a copy there, nothing on the way back."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from src.kernels.registry import Ops
from src.kernels.sort_by_expert import Order


class LocalPlan(NamedTuple):
    """What must be known of a dispatch later."""

    row_token_N: Tensor
    slot_row_TK: Tensor


class LocalDispatcher:
    """The dispatcher for ep = 1 (protocol.Dispatcher); issues no host synchronisation."""

    returns = False

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
        plan = LocalPlan(order.row_slot_N // ids_TK.shape[1], order.slot_row_N.view(ids_TK.shape))
        counts_E = order.offs_E.diff(prepend=order.offs_E.new_zeros(1))
        return self.dispatch_again(tokens_TD, plan), counts_E, plan

    def dispatch_again(self, tokens_TD: Tensor, plan: LocalPlan) -> Tensor:
        """Rows [T·K,D] as before."""
        rows_ND: Tensor = self.ops.permute(tokens_TD, *plan)
        return rows_ND

    def combine(self, rows_RD: Tensor, plan: LocalPlan) -> Tensor:
        """The rows, which are home."""
        return rows_RD

    def home(self, plan: LocalPlan) -> Tensor:
        """See `protocol.Dispatcher`."""
        return plan.slot_row_TK
