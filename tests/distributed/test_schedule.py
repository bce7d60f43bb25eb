"""Schedules replayed without processes: closed forms, each micro-batch once, no deadlock (ENG-13, ENG-14)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import src
from src.config import Config, MeshConfig, PipelineConfig
from src.models.stage import Stage
from src.trainer.parallel import assemble, layout
from src.trainer.parallel.layout import split_layers
from src.trainer.parallel.pipeline import adapter
from src.trainer.parallel.pipeline.adapter import to_torch
from src.trainer.parallel.pipeline.schedule import Action, Table, peak_live
from src.trainer.parallel.pipeline.tables import make_table
from src.trainer.parallel.pipeline.timeline import simulate
from src.trainer.parallel.rules import micro_batch_fault
from src.trainer.runtime import Runtime
from tests.models.odd import deepseek_v2

KINDS = [("gpipe", 1), ("1f1b", 1), *(("interleaved_1f1b", v) for v in (2, 3)), ("zbv", 2), ("dualpipev", 2)]
"""Schedule and stages per rank."""


def makespan(schedule: str, P: int, v: int, N: int) -> int | None:
    """Closed forms of ENG-13's table, in units of a forward; None where it gives none."""
    return {
        "gpipe": 3 * (N + P - 1),
        "1f1b": 3 * (N + P - 1),
        "interleaved_1f1b": 3 * (v * N + P - 1) if N % P == 0 else None,
        "zbv": 6 * N + P - 1 if N >= 2 * P - 1 else None,
        "dualpipev": 6 * N + 2 * (P - 1),
    }[schedule]


def sizes(most: int, every: bool) -> Iterator[tuple[int, int]]:
    """Ranks and micro-batches: all up to eight times the ranks, or few around the bounds."""
    for P in range(1, most + 1):
        few = {1, 2, 3, P, P + 1, 2 * P - 1, 2 * P, 2 * P + 1, 5 * P}
        for N in range(1, 8 * P + 1) if every else sorted(few):
            yield P, N


def faults(table: Table, P: int, v: int, N: int) -> list[str]:
    """What is wrong with a table: computations that miss or are double, a turn that never comes."""
    counts = Counter(action for turns in table.values() for turn in turns for action in turn)
    wrong = [f"{action} {count} times" for action, count in counts.items() if count > 1]
    for stage in range(P * v):
        for m in range(N):
            kinds = "".join(kind for kind in "FBIW" if counts[Action(kind, stage, m)])
            wrong += [] if kinds in ("FB", "FIW") else [f"stage {stage} micro-batch {m}: {kinds}"]
    wrong += [f"{action} of no micro-batch" for action in counts if not 0 <= action.micro_batch < N]
    try:
        simulate(table)
    except AssertionError as error:
        wrong.append(str(error))
    return wrong


def check_closed_forms(schedule: str, v: int, every: bool) -> int:
    """Compare; returns how many combinations were looked at."""
    seen = 0
    for P, N in sizes(8, every):
        if micro_batch_fault(schedule, P, N) is not None:
            continue
        table = make_table(schedule, P, v, N)
        assert faults(table, P, v, N) == [], (schedule, P, v, N)
        timeline, span = simulate(table), makespan(schedule, P, v, N)
        assert span is None or timeline.makespan == span, (schedule, P, v, N)
        expected = [peak_live(schedule, P, v, N, rank) for rank in range(P)]
        assert [timeline.peak_live(rank) for rank in range(P)] == expected, (schedule, P, v, N)
        seen += 1
    return seen


@pytest.mark.parametrize(("schedule", "v"), KINDS)
def test_closed_forms(schedule: str, v: int) -> None:
    """ENG-13: makespan, peak of live activations; every (stage, micro-batch) F once, B once or I then W."""
    assert check_closed_forms(schedule, v, every=False) >= 20


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "v"), KINDS)
def test_closed_forms_of_every_size(schedule: str, v: int) -> None:
    """ENG-13: the same for P ≤ 8 and all N ≤ 8P that the schedule takes."""
    assert check_closed_forms(schedule, v, every=True) >= 100


def test_a_lost_backward_is_noticed() -> None:
    """T-5: a table without one whole backward, without one weight gradient, or with two swapped turns."""
    for kind in "BW":
        table = make_table("dualpipev", 4, 2, 9)
        rank = next(r for r in (1, 2) if any(turn[-1].kind == kind for turn in table[r]))
        lost = next(turn for turn in table[rank] if turn[-1].kind == kind)
        table[rank].remove(lost)
        assert faults(table, 4, 2, 9)
    swapped = make_table("zbv", 2, 2, 4)
    swapped[1].insert(0, swapped[1].pop(3))
    assert "deadlock" in faults(swapped, 2, 2, 4)[-1]


@pytest.mark.parametrize(("schedule", "v"), KINDS)
def test_counts_that_are_refused_cannot_run(schedule: str, v: int) -> None:
    """ENG-1: the rule takes a number of micro-batches just when the table for it is whole and can run.

    But for dualpipev's 2P-1, which would run; its authors and torch ask for 2P.
    """
    for P, N in sizes(4, every=True):
        if P == 1 or N > 3 * P or (schedule == "dualpipev" and N == 2 * P - 1):
            continue
        fault = micro_batch_fault(schedule, P, N)
        assert (fault is not None) == bool(faults(make_table(schedule, P, v, N), P, v, N)), (P, N)
        if fault is not None:
            assert [micro_batch_fault(schedule, P, n) for n in fault[1]] == [None] * len(fault[1])


@pytest.mark.parametrize(("schedule", "v"), KINDS)
def test_torch_lowers_every_table(schedule: str, v: int) -> None:
    """ENG-13: torch adds sends and receives and its simulation of the result finishes."""
    from torch.distributed.pipelining import schedules

    for P, N in [(2, 1), (2, 5), (4, 3), (4, 9)]:
        if micro_batch_fault(schedule, P, N) is not None:
            continue
        config = Config(mesh=MeshConfig(pp=P), pipeline=PipelineConfig(schedule, v))
        owners = [layout.rank_of(config, stage) for stage in range(P * v)]
        lowered = schedules._add_send_recv(to_torch(make_table(schedule, P, v, N)), owners.__getitem__, P * v)
        single = {  # Torch's simulation knows no pairs.
            rank: [part for action in actions for part in action.sub_actions or (action,)]
            for rank, actions in lowered.items()
        }
        schedules._simulate_comms_compute(single, owners.__getitem__, P * v)
        sends = [a for actions in lowered.values() for a in actions if a.computation_type == schedules.SEND_F]
        crossed = sum(a != b for a, b in pairwise(owners))
        assert len(sends) == crossed * N


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


def placed(schedule: str, P: int, v: int, layers: int) -> dict[int, tuple[Stage, ...]]:
    """Stages of each pipeline rank as a run builds them."""
    model = deepseek_v2(num_layers=layers)
    config = Config(model=model, mesh=MeshConfig(pp=P), pipeline=PipelineConfig(schedule, v))
    return {rank: assemble.holding_of(config, runtime_of(config.mesh, rank)).stages for rank in range(P)}


def runtime_of(mesh: MeshConfig, rank: int) -> Runtime:
    """A runtime without processes."""
    import torch

    return Runtime(rank, mesh.world, rank, torch.device("cpu"), mesh, layout.coordinates(mesh, rank))


def misplaced(schedule: str, P: int, v: int, layers: int) -> list[str]:
    """Layers that are not held once, and ends of the model that are not where the table looks for them."""
    ranks = placed(schedule, P, v, layers)
    held = sorted(index for stages in ranks.values() for stage in stages for index in stage.layers)
    wrong = [] if held == list(range(layers)) else [f"layers {held}"]
    table = make_table(schedule, P, v, 2 * P)
    computed = {rank: sorted({a.stage for turn in turns for a in turn}) for rank, turns in table.items()}
    numbered = [pair for rank in ranks for pair in zip(computed[rank], ranks[rank], strict=True)]
    for rank, stages in ranks.items():
        for number, stage in zip(computed[rank], stages, strict=True):
            fits = (stage.first, stage.last) == (number == 0, number == P * v - 1)
            if not fits or stage.layers.start != sum(len(s.layers) for n, s in numbered if n < number):
                wrong.append(f"rank {rank}, stage {number}: {stage}")
    return wrong


@pytest.mark.parametrize(("schedule", "v"), KINDS)
def test_stages_are_where_the_table_has_them(schedule: str, v: int) -> None:
    """ENG-14, ENG-1: a rank builds the stages that its table computes; in a V the first holds both ends."""
    for P in (2, 3, 4):
        for layers in {P * v, P * v + 1, 17}:
            assert misplaced(schedule, P, v, layers) == []
        first = placed(schedule, P, v, 17)[0]
        assert first[0].first
        assert first[-1].last == (schedule in layout.IN_V)


def test_wrong_places_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """T-5: the ends of a V as in a loop, and a split that drops the last layer [Megatron-LM #1304]."""
    with monkeypatch.context() as patch:
        patch.setattr(layout, "rank_of", lambda config, stage: stage % config.mesh.pp)
        assert misplaced("zbv", 2, 2, 7)
    with monkeypatch.context() as patch:
        patch.setattr(layout, "split_layers", lambda layers, stages: split_layers(layers - 1, stages))
        assert misplaced("zbv", 2, 2, 7)


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
