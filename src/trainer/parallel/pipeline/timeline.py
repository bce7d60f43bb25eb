"""When each computation of a table runs, in units of one forward; nothing is computed, and no torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from src.trainer.parallel.pipeline.schedule import Action, Kind, Table, Turn

UNITS: dict[Kind, int] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Length of a computation: a backward is twice a forward, its two parts as long as each other."""


class Box(NamedTuple):
    """One computation in time."""

    rank: int
    action: Action
    start: int
    end: int
    is_paired: bool
    """Whether it may overlap with its neighbour in the turn."""


@dataclass(frozen=True)
class Timeline:
    """A table in time; sends take none."""

    boxes: tuple[Box, ...]

    @property
    def makespan(self) -> int:
        """From the first start to the last end."""
        return max(box.end for box in self.boxes)

    @property
    def ranks(self) -> list[int]:
        """Pipeline ranks, ascending."""
        return sorted({box.rank for box in self.boxes})

    def of(self, rank: int) -> list[Box]:
        """A rank's computations, in order."""
        return [box for box in self.boxes if box.rank == rank]

    def idle(self, rank: int) -> float:
        """Share of the makespan in which a rank waits."""
        return 1 - sum(box.end - box.start for box in self.of(rank)) / self.makespan

    def peak_live(self, rank: int) -> int:
        """Activations, of one micro-batch in one stage each, that a rank holds at most: from F to B or W."""
        live = peak = 0
        for box in self.of(rank):
            live += {"F": 1, "B": -1, "I": 0, "W": -1}[box.action.kind]
            peak = max(peak, live)
        return peak


def simulate(table: Table) -> Timeline:
    """Run a table on paper, every rank as early as its order and its inputs allow.

    What the actions of one turn hand on leaves at its end, as torch sends it.
    """
    last = max(action.stage for turns in table.values() for turn in turns for action in turn)
    ends: dict[Action, int] = {}
    boxes: list[Box] = []
    clock, at = dict.fromkeys(table, 0), dict.fromkeys(table, 0)
    while any(at[rank] < len(table[rank]) for rank in table):
        moved = False
        for rank, turns in table.items():
            while at[rank] < len(turns) and (start := _ready(turns[at[rank]], ends, last)) is not None:
                turn, moved = turns[at[rank]], True
                boxes += _boxes(rank, turn, max(start, clock[rank]))
                clock[rank] = boxes[-1].end
                ends |= dict.fromkeys(turn, clock[rank])
                at[rank] += 1
        assert moved, f"deadlock: ranks wait at {[table[rank][at[rank] :][:1] for rank in table]}"
    return Timeline(tuple(boxes))


def _ready(turn: Turn, ends: dict[Action, int], last: int) -> int | None:
    """When the last input of a turn is there; None if one is not computed yet."""
    times = [
        max((ends.get(Action(kind, stage, action.micro_batch), -1) for kind in kinds), default=0)
        for action in turn
        for kinds, stage in _inputs(action, last)
    ]
    return None if -1 in times else max(times, default=0)


def _inputs(action: Action, last: int) -> list[tuple[tuple[Kind, ...], int]]:
    """Kinds, one of which is waited for, and the stage that computes it."""
    if action.kind == "F":
        return [(("F",), action.stage - 1)] if action.stage else []
    if action.kind == "W":
        return [(("I",), action.stage)]
    own: list[tuple[tuple[Kind, ...], int]] = [(("F",), action.stage)]
    return own if action.stage == last else [*own, (("B", "I"), action.stage + 1)]


def _boxes(rank: int, turn: Turn, start: int) -> list[Box]:
    boxes = []
    for action in turn:
        boxes.append(Box(rank, action, start, start + UNITS[action.kind], len(turn) > 1))
        start = boxes[-1].end
    return boxes
