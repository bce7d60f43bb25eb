"""Tables of pipeline schedules, those of `gpipe` and `1f1b`, and how much each schedule keeps; no torch here.

A table says for each rank in which order it runs the forwards and backwards of its micro-batches (ENG-13).
Sends and receives are added by torch's lowering (`adapter.py`). The 1F1B table is ours because torch's
`Schedule1F1B._get_pipeline_order` is wrong on the last rank (2.11 to 2.13): its forwards are 1…N, not 0…N-1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
"""Forward, whole backward, and a backward in two: of the input, and later of the weights."""
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


class Action(NamedTuple):
    """One computation of one stage."""

    kind: Kind
    stage: int
    micro_batch: int


Turn = tuple[Action, ...]
"""What a rank does in one go: an action, or a forward and another micro-batch's backward that may overlap."""
Table = dict[int, list[Turn]]
"""Rank → its turns in order."""


def gpipe(ranks: int, micro_batches: int) -> Table:
    """All forwards, then all backwards."""
    order: list[tuple[Kind, int]] = [(kind, m) for kind in KINDS[:2] for m in range(micro_batches)]
    return {rank: [(Action(kind, rank, m),) for kind, m in order] for rank in range(ranks)}


def one_f_one_b(ranks: int, micro_batches: int) -> Table:
    """min(N, P-1-r) forwards, then pairs of a forward and a backward, then the backwards that are left."""
    table: Table = {}
    for rank in range(ranks):
        warm = min(micro_batches, ranks - 1 - rank)
        actions = [Action("F", rank, m) for m in range(warm)]
        for m in range(warm, micro_batches):
            actions += [Action("F", rank, m), Action("B", rank, m - warm)]
        actions += [Action("B", rank, m) for m in range(micro_batches - warm, micro_batches)]
        table[rank] = [(action,) for action in actions]
    return table


TABLES: dict[str, Callable[[int, int], Table]] = {"gpipe": gpipe, "1f1b": one_f_one_b}
"""Value of `pipeline.schedule` → table of (ranks, micro-batches), one stage a rank."""


def round_size(ranks: int, micro_batches: int) -> int:
    """Micro-batches that `interleaved_1f1b` takes through a stage before it turns to the rank's next one."""
    return micro_batches // max(1, micro_batches // ranks)


def peak_live(schedule: str, ranks: int, per_rank: int, micro_batches: int, rank: int) -> int:
    """Activations, of one micro-batch in one stage each, that a rank holds at most (ENG-13)."""
    P, v, N, r = ranks, per_rank, micro_batches, rank
    return {
        "gpipe": N,
        "1f1b": min(N, P - r),
        "interleaved_1f1b": min(v * N, (v - 1) * round_size(P, N) + 2 * (P - 1 - r) + 1),
        "zbv": min(2 * N, N + 1 + r, 2 * P),
        "dualpipev": 2 * P + 1,
    }[schedule]
