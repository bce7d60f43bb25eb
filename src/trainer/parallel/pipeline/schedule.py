"""Tables of `gpipe` and `1f1b`, and their closed forms (ENG-13); no torch here.

A table says for each rank in which order it runs the forwards and backwards of its micro-batches. Sends and
receives are added by torch's lowering (`adapter.py`). The 1F1B table is ours because torch's
`Schedule1F1B._get_pipeline_order` is wrong on the last rank (2.11 to 2.13): its forwards are 1…N, not 0…N-1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

Kind = Literal["F", "B"]


class Action(NamedTuple):
    """One computation of one rank."""

    kind: Kind
    stage: int
    micro_batch: int


Table = dict[int, list[Action]]
"""Rank → its actions in order."""


def gpipe(ranks: int, micro_batches: int) -> Table:
    """All forwards, then all backwards."""
    return {
        rank: [Action("F", rank, m) for m in range(micro_batches)]
        + [Action("B", rank, m) for m in range(micro_batches)]
        for rank in range(ranks)
    }


def one_f_one_b(ranks: int, micro_batches: int) -> Table:
    """min(N, P-1-r) forwards, then pairs of a forward and a backward, then the backwards that are left."""
    table: Table = {}
    for rank in range(ranks):
        warm = min(micro_batches, ranks - 1 - rank)
        actions = [Action("F", rank, m) for m in range(warm)]
        for m in range(warm, micro_batches):
            actions += [Action("F", rank, m), Action("B", rank, m - warm)]
        table[rank] = actions + [Action("B", rank, m) for m in range(micro_batches - warm, micro_batches)]
    return table


TABLES: dict[str, Callable[[int, int], Table]] = {"gpipe": gpipe, "1f1b": one_f_one_b}
"""Value of `pipeline.schedule` → table of (ranks, micro-batches)."""


def peak_live(schedule: str, ranks: int, micro_batches: int, rank: int) -> int:
    """Micro-batches whose activations a rank holds at most."""
    return micro_batches if schedule == "gpipe" else min(micro_batches, ranks - rank)


def makespan(ranks: int, micro_batches: int) -> int:
    """Length of both schedules when a forward takes 1 and a whole backward 2."""
    return 3 * (micro_batches + ranks - 1)
