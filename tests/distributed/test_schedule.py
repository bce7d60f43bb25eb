"""Schedules replayed without processes: closed forms, each micro-batch once, no deadlock (ENG-13, ENG-14)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import src
from src.trainer.parallel.layout import split_layers
from src.trainer.parallel.pipeline import adapter
from src.trainer.parallel.pipeline.adapter import lowerable
from src.trainer.parallel.pipeline.schedule import TABLES, Action, Table, makespan, peak_live

COST = {"F": 1, "B": 2}
SIZES = [(ranks, n) for ranks in range(1, 9) for n in {1, 2, 3, ranks, ranks + 1, 2 * ranks + 1, 8 * ranks}]


def needs(action: Action, ranks: int) -> list[Action]:
    """What an action waits for: its neighbour's, and a backward also its own forward."""
    kind, stage, m = action
    if kind == "F":
        return [Action("F", stage - 1, m)] if stage else []
    return [Action("F", stage, m)] + ([Action("B", stage + 1, m)] if stage < ranks - 1 else [])


def replay(table: Table) -> tuple[int, dict[int, int]]:
    """Makespan with F = 1 and B = 2, and peak of live micro-batches per rank; an error if it cannot go on."""
    ends: dict[Action, int] = {}
    clock, at, live, peak = (dict.fromkeys(table, 0) for _ in range(4))
    while any(at[rank] < len(table[rank]) for rank in table):
        before = dict(at)
        for rank, actions in table.items():
            while at[rank] < len(actions) and all(n in ends for n in needs(actions[at[rank]], len(table))):
                action = actions[at[rank]]
                start = max([clock[rank], *(ends[n] for n in needs(action, len(table)))])
                clock[rank] = ends[action] = start + COST[action.kind]
                live[rank] += 1 if action.kind == "F" else -1
                peak[rank] = max(peak[rank], live[rank])
                at[rank] += 1
        assert at != before, f"deadlock at {at}"
    return max(clock.values()), peak


@pytest.mark.parametrize("schedule", TABLES)
def test_closed_forms(schedule: str) -> None:
    """ENG-13: makespan 3(N+P-1); peak N or min(N, P-r); every (stage, micro-batch) once F, once B."""
    for ranks, n in SIZES:
        table = TABLES[schedule](ranks, n)
        for rank, actions in table.items():
            assert sorted(actions) == sorted(Action(kind, rank, m) for kind in ("F", "B") for m in range(n))
        span, peak = replay(table)
        assert span == makespan(ranks, n)
        assert peak == {rank: peak_live(schedule, ranks, n, rank) for rank in range(ranks)}


@pytest.mark.parametrize("schedule", TABLES)
def test_torch_lowers_our_tables(schedule: str) -> None:
    """ENG-13: torch adds sends and receives to our tables and its simulation of the result finishes."""
    from torch.distributed.pipelining import schedules

    for ranks, n in [(2, 1), (2, 5), (4, 3), (4, 9)]:
        lowered = schedules._add_send_recv(lowerable(TABLES[schedule](ranks, n)), lambda stage: stage, ranks)
        schedules._simulate_comms_compute(lowered, lambda stage: stage, ranks)
        sends = [a for actions in lowered.values() for a in actions if a.computation_type == schedules.SEND_F]
        assert len(sends) == (ranks - 1) * n


def test_private_names_of_torch_stand_in_one_file() -> None:
    """ENG-13: an upgrade of torch has one file of at most 250 lines to look at."""
    private = re.compile(r"_PipelineSchedule|schedules\._|stage\._|_fsdp_param|_state_ctx|\._lazy_init")
    files = sorted(Path(src.__path__[0]).rglob("*.py"))
    assert [path.name for path in files if private.search(path.read_text())] == ["adapter.py"]
    assert len(Path(adapter.__file__).read_text().splitlines()) <= 250


def test_torch_1f1b_table_is_wrong_on_the_last_rank() -> None:
    """ENG-13 [m]: the fact that our own table exists for; when this fails, torch has mended it."""
    from types import SimpleNamespace

    from torch.distributed.pipelining import schedules

    fake = SimpleNamespace(pp_group_size=4, _n_microbatches=6, _num_stages=4)
    order = schedules.Schedule1F1B._get_pipeline_order(fake)  # type: ignore[arg-type]
    assert order is not None
    forwards = [
        a.microbatch_index for a in order[3] if a is not None and a.computation_type == schedules.FORWARD
    ]
    assert forwards == [1, 2, 3, 4, 5, 6]


def test_layers_on_stages() -> None:
    """ENG-14: contiguous, each layer once, sizes differ by at most one, the larger ones inside first."""
    for layers in range(1, 101):
        for stages in range(1, min(layers, 16) + 1):
            parts = split_layers(layers, stages)
            assert [index for part in parts for index in part] == list(range(layers))
            sizes = [len(part) for part in parts]
            assert max(sizes) - min(sizes) <= 1
            large = sum(sizes) - stages * min(sizes)
            inner = sum(size > min(sizes) for size in sizes[1:-1])
            assert large == 0 or inner == min(large, max(0, stages - 2))
    assert [len(part) for part in split_layers(27, 8)] == [3, 4, 4, 4, 3, 3, 3, 3]
    assert [len(part) for part in split_layers(7, 4)] == [2, 2, 2, 1]
