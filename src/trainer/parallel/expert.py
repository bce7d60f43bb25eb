"""Stages 2 and 4 over expert-parallel ranks: an uneven all-to-all there and back (ENG-18 to ENG-20).

A token travels once to each rank that owns one of its experts and is expanded there; every routed row returns
once per (token, expert). Rows arrive ordered by (local expert, source rank, token). Sums of gradients are
gathers over index tables, so nothing depends on the order in which threads arrive. Letters: T tokens here, K
top-k, E experts, L local experts, P ranks of the group, U unique rows received, R routed rows received.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from src.kernels.registry import Ops


@dataclass(frozen=True)
class Plan:
    """How the rows of one dispatch go out and come home."""

    token_U: Tensor
    """Token of each row sent, in order of (owner, token)."""
    place_TP: Tensor
    """Row sent of each (token, owner), U where the token does not go."""
    out: tuple[list[int], list[int]]
    """Unique rows sent to and received from each rank on the way out."""
    row_R: Tensor
    """Received row of each routed row, in the expert order."""
    sorted_UK: Tensor
    """Routed row of each (received row, slot), R where the expert is another rank's."""
    arrived_R: Tensor
    """Row of the expert order that each row to be returned is, in order of (source rank, token, slot)."""
    expert_order_R: Tensor
    """Inverse of `arrived_R`."""
    home_TK: Tensor
    """Returned row of each token's k-th expert."""
    back: tuple[list[int], list[int]]
    """Rows sent to and received from each rank on the way home."""


class ExpertDispatcher:
    """Dispatch and combine over the ranks that own the experts."""

    returns = True

    def __init__(self, group: dist.ProcessGroup, experts: int, ops: Ops) -> None:
        self._group, self._permute = group, ops.permute
        self._ranks = dist.get_world_size(group)
        self._rank = dist.get_rank(group)
        self._local = experts // self._ranks
        assert self._local * self._ranks == experts, (experts, self._ranks)

    def order(self, ids_TK: Tensor) -> None:
        """See `protocol.Dispatcher`: rows travel."""

    def dispatch(self, tokens_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor, Plan]:
        """Send tokens to the owners of their experts.

        Args:
            tokens_TD: tokens of this rank.
            ids_TK: int32 or int64, K distinct expert ids of each.

        Returns:
            rows [R,D] ordered by (local expert, source rank, token); int32 rows per local expert [L]; the
            plan for `combine`. Reads the device once, for the split sizes.
        """
        owner_TK = ids_TK.long() // self._local
        goes_PT, place_TP = unique_rows(owner_TK, self._ranks)
        sent_PL, got_PL = self._exchange_counts(ids_TK, goes_PT.sum(1))
        splits = torch.stack(
            [sent_PL[:, 0], got_PL[:, 0], sent_PL[:, 1:].sum(1), got_PL[:, 1:].sum(1)]
        ).tolist()
        out, into = splits[0], splits[1]
        token_U = first_true(goes_PT.flatten(), sum(out)) % max(1, ids_TK.shape[0])
        got_ids_UK = exchange(ids_TK[token_U], out, into, self._group)
        row_R, sorted_UK, arrived_R = self._by_expert(got_ids_UK, sum(splits[3]))
        plan = Plan(
            token_U=token_U,
            place_TP=place_TP,
            out=(out, into),
            row_R=row_R,
            sorted_UK=sorted_UK,
            arrived_R=arrived_R,
            expert_order_R=invert(arrived_R),
            home_TK=invert(owner_TK.flatten().argsort(stable=True)).view_as(owner_TK),
            back=(splits[3], splits[2]),
        )
        return self.dispatch_again(tokens_TD, plan), got_PL[:, 1:].sum(0).to(torch.int32), plan

    def dispatch_again(self, tokens_TD: Tensor, plan: object) -> Tensor:
        """Rows [R,D] by a plan made before: two copies and one exchange."""
        assert isinstance(plan, Plan), plan
        sent_UD = self._permute(tokens_TD, plan.token_U, plan.place_TP)
        unique_UD = all_to_all(sent_UD, *plan.out, self._group)
        rows_RD: Tensor = self._permute(unique_UD, plan.row_R, plan.sorted_UK)
        return rows_RD

    def combine(self, rows_RD: Tensor, plan: object) -> Tensor:
        """Rows [T·K,D] back at the rank that owns the token, in order of (owner, token, k)."""
        assert isinstance(plan, Plan), plan
        out, into = plan.back
        ordered_RD = self._permute(rows_RD, plan.arrived_R, plan.expert_order_R[:, None])
        return all_to_all(ordered_RD, out, into, self._group)

    def home(self, plan: object) -> Tensor:
        """See `protocol.Dispatcher`."""
        assert isinstance(plan, Plan), plan
        return plan.home_TK

    def _exchange_counts(self, ids_TK: Tensor, unique_P: Tensor) -> tuple[Tensor, Tensor]:
        """Sent and received: per peer its unique rows, then routed rows per local expert, int64 [P,1+L]."""
        routed_E = count_ids(ids_TK, self._ranks * self._local)
        sent = torch.cat([unique_P[:, None], routed_E.view(self._ranks, self._local)], 1)
        return sent, exchange(sent, [1] * self._ranks, [1] * self._ranks, self._group)

    def _by_expert(self, ids_UK: Tensor, routed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Order the routed pairs of the received rows by (local expert, source rank, token).

        Returns:
            received row of each routed row [R]; routed row of each (received row, slot) [U,K], R where the
            expert is another rank's; routed row of each pair in order of (received row, slot) [R].
        """
        local_UK = ids_UK - self._rank * self._local
        mine_UK = (local_UK >= 0) & (local_UK < self._local)
        pair_R = torch.where(mine_UK, local_UK, self._local).flatten().argsort(stable=True)[:routed]
        sorted_UK = torch.full((ids_UK.numel(),), routed, device=ids_UK.device)
        sorted_UK.scatter_(0, pair_R, torch.arange(routed, device=ids_UK.device))
        arrived_R = sorted_UK[pair_R.sort().values]
        return pair_R // ids_UK.shape[1], sorted_UK.view_as(ids_UK), arrived_R


def unique_rows(owner_TK: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Which rows to send when a token goes once to each owner of its experts, in order of (owner, token).

    Returns:
        whether the token goes to the owner [P,T]; its row there [T,P], the sum of rows where it does not go.
    """
    goes_TP = torch.zeros(owner_TK.shape[0], ranks, dtype=torch.bool, device=owner_TK.device)
    goes_PT = goes_TP.scatter_(1, owner_TK, True).t().contiguous()
    row_PT = goes_PT.flatten().cumsum(0).view_as(goes_PT) - 1
    return goes_PT, torch.where(goes_PT, row_PT, goes_PT.sum()).t().contiguous()


def first_true(mask_N: Tensor, count: int) -> Tensor:
    """Positions of the `count` true elements, ascending; unlike `nonzero` it does not wait for the device."""
    return (~mask_N).to(torch.uint8).argsort(stable=True)[:count]


def count_ids(ids_TK: Tensor, experts: int) -> Tensor:
    """int64 rows per expert [E]; integer sums, so their order does not matter."""
    counts_E = torch.zeros(experts, dtype=torch.int64, device=ids_TK.device)
    flat = ids_TK.flatten().long()
    return counts_E.scatter_add_(0, flat, torch.ones_like(flat))


def invert(permutation: Tensor) -> Tensor:
    """The inverse of a permutation."""
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(permutation.numel(), device=permutation.device)
    return inverse


def exchange(rows: Tensor, out: list[int], into: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows of an uneven all-to-all: `out[p]` to and `into[p]` from rank p; no gradient."""
    received = rows.new_empty((sum(into), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), into, out, group=group)
    return received


def all_to_all(rows: Tensor, out: list[int], into: list[int], group: dist.ProcessGroup) -> Tensor:
    """`exchange` with its adjoint: the same exchange the other way round."""
    received: Tensor = AllToAll.apply(rows, out, into, group)  # type: ignore[no-untyped-call]
    return received


class AllToAll(Function):
    """Behind `all_to_all`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, out: list[int], into: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.out, ctx.into, ctx.group = out, into, group
        return exchange(rows, out, into, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange(grad, ctx.into, ctx.out, ctx.group), None, None, None
