"""Dispatch and combine: order, dedup, degenerate routings, adjointness (ENG-18 to ENG-20)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from src.config import DeterminismConfig, KernelsConfig
from src.kernels.registry import resolve
from src.trainer.parallel.expert import ExpertDispatcher
from tests.distributed import world
from tests.distributed.patches import wrapped

EXPERTS, TOP_K, WIDTH = 12, 3, 5
OPS = resolve(KernelsConfig("eager"), torch.device("cpu"), torch.float64, DeterminismConfig(), {})
Route = Callable[[int, torch.Generator], Tensor]


def random_route(tokens: int, generator: torch.Generator) -> Tensor:
    return torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(tokens)]).int()


def one_place(tokens: int, generator: torch.Generator) -> Tensor:
    return torch.tensor([[7, 6, 8]], dtype=torch.int32).expand(tokens, TOP_K).contiguous()


def empty(tokens: int, generator: torch.Generator) -> Tensor:
    return torch.zeros(0, TOP_K, dtype=torch.int32)


ROUTES: dict[str, tuple[Route, int]] = {
    "random": (random_route, 11),
    "all to one owner": (one_place, 7),
    "one token": (random_route, 1),
    "no token": (empty, 0),
    "no token on rank 0": (random_route, -5),
}
"""Name → routing and tokens per rank; a negative number leaves rank 0 without."""


def inputs(name: str, rank: int) -> tuple[Tensor, Tensor]:
    """fp64 tokens, and ids, of one rank."""
    route, tokens = ROUTES[name]
    tokens = (0 if rank == 0 else -tokens) if tokens < 0 else tokens + rank * (tokens > 1)
    generator = torch.Generator().manual_seed(100 * rank + len(name))
    ids_TK = route(tokens, generator) if tokens else empty(0, generator)
    return torch.randn(tokens, WIDTH, dtype=torch.float64, generator=generator), ids_TK


def expert_function(rows_RD: Tensor, counts_L: Tensor, first: int) -> Tensor:
    """Expert e maps x to (e + 1)·x² + e, so that rows of another expert or token show."""
    expert_R = torch.repeat_interleave(torch.arange(first, first + len(counts_L)), counts_L.long())
    return (expert_R[:, None] + 1) * rows_RD**2 + expert_R[:, None]


def check_route(name: str) -> None:
    """Values and gradients against an expert applied at home; row order; adjointness of both stages."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dispatcher = ExpertDispatcher(dist.group.WORLD, EXPERTS, OPS)
    tokens_TD, ids_TK = inputs(name, rank)
    tokens_TD.requires_grad_()
    rows_RD, counts_L, plan = dispatcher.dispatch(tokens_TD, ids_TK)
    check_order(name, rows_RD.detach(), counts_L)
    out_ND = dispatcher.combine(expert_function(rows_RD, counts_L, rank * EXPERTS // ranks), plan)
    out_TKD = out_ND[dispatcher.home(plan)]
    expert_TK1 = ids_TK[..., None].double()
    expected_TKD = (expert_TK1 + 1) * tokens_TD.detach()[:, None] ** 2 + expert_TK1
    assert torch.equal(out_TKD, expected_TKD)
    cotangent = torch.randn(out_TKD.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    out_TKD.backward(cotangent)
    expected = (cotangent * (expert_TK1 + 1) * 2 * tokens_TD.detach()[:, None]).sum(1)
    assert tokens_TD.grad is not None
    torch.testing.assert_close(tokens_TD.grad, expected, rtol=1e-12, atol=1e-12)
    check_adjoint(dispatcher, tokens_TD.detach(), ids_TK)


def check_order(name: str, rows_RD: Tensor, counts_L: Tensor) -> None:
    """Rows arrive by (local expert, source rank, token), each once: ENG-18."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    block = EXPERTS // ranks
    expected, counts = [], []
    for expert in range(rank * block, (rank + 1) * block):
        sources = [inputs(name, source) for source in range(ranks)]
        rows = [tokens_TD[(ids_TK == expert).any(1)] for tokens_TD, ids_TK in sources]
        expected += rows
        counts.append(sum(len(r) for r in rows))
    assert torch.equal(rows_RD, torch.cat(expected))
    assert counts_L.dtype == torch.int32
    assert counts_L.tolist() == counts


def check_adjoint(dispatcher: ExpertDispatcher, tokens_TD: Tensor, ids_TK: Tensor) -> None:
    """⟨D x, y⟩ = ⟨x, Dᵀ y⟩ over all ranks, to 1e-12 (ENG-20)."""
    generator = torch.Generator().manual_seed(17 + dist.get_rank())
    x = tokens_TD.clone().requires_grad_()
    rows_RD, _, plan = dispatcher.dispatch(x, ids_TK)
    leaf = rows_RD.detach().clone().requires_grad_()
    home = dispatcher.combine(leaf, plan)
    for into, out in ((x, rows_RD), (leaf, home)):
        y = torch.randn(out.shape, dtype=torch.float64, generator=generator)
        (gradient,) = torch.autograd.grad(out, into, y)
        pair = torch.stack([(out.detach() * y).sum(), (into.detach() * gradient).sum()])
        dist.all_reduce(pair)
        left, right = pair.tolist()
        assert math.isclose(left, right, rel_tol=1e-12, abs_tol=1e-12), (left, right)


def check_traffic() -> int:
    """A token crosses the all-to-all once per owner of its experts; returns the number of collectives out."""
    tokens_TD, ids_TK = inputs("random", dist.get_rank())
    ranks = dist.get_world_size()
    owners = [{int(i) // (EXPERTS // ranks) for i in row} for row in ids_TK]
    dispatcher = ExpertDispatcher(dist.group.WORLD, EXPERTS, OPS)
    sent: list[int] = []

    def counted(original: Any, output: Tensor, into: Tensor, *arguments: Any, **keywords: Any) -> Any:
        sent.append(into.numel() if into.dtype == torch.float64 else 0)
        return original(output, into, *arguments, **keywords)

    with wrapped(dist, "all_to_all_single", counted):
        dispatcher.dispatch(tokens_TD, ids_TK)
    assert sent[-1] == WIDTH * sum(len(o) for o in owners)
    return len(sent)


def count_reads() -> list[int]:
    """Reads of the device by a dispatch and combine, then by their backward."""
    tokens_TD, ids_TK = inputs("random", dist.get_rank())
    tokens_TD.requires_grad_()
    dispatcher = ExpertDispatcher(dist.group.WORLD, EXPERTS, OPS)
    reads: Counter[str] = Counter()

    def counted(original: Any, *arguments: Any) -> Any:
        reads["device"] += 1
        return original(*arguments)

    found = []
    with ExitStack() as stack:
        for name in ("tolist", "item", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
            stack.enter_context(wrapped(torch.Tensor, name, counted))
        rows_RD, _, plan = dispatcher.dispatch(tokens_TD, ids_TK)
        home_ND = dispatcher.combine(rows_RD, plan)
        found.append(reads["device"])
        home_ND.backward(torch.ones_like(home_ND))
        found.append(reads["device"] - found[0])
    return found


def check_all() -> tuple[int, list[int]]:
    for name in ROUTES:
        check_route(name)
    return check_traffic(), count_reads()


@pytest.mark.parametrize("ranks", [2, 4])
def test_dispatch_and_combine(ranks: int) -> None:
    """ENG-18 to ENG-20: every routing; three collectives out; one device read forward, none backward."""
    assert world.run(ranks, check_all) == [(3, [1, 0])] * ranks
