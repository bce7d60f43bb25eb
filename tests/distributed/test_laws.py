"""Law 1: the same weights, losses, gradients, norm, counts, updates on every mesh (T-1 to T-5)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.distributed import world
from tests.distributed.configs import (
    MESHES,
    MORE_CONTEXT,
    PRECISIONS,
    SHARED,
    WIDE,
    Case,
    Key,
    make_config,
    matrix,
)
from tests.distributed.laws import measure_all
from tests.distributed.mutations import MUTATIONS, measure_mutants
from tests.distributed.reference import Trace, train

Traces = dict[Key, Trace]


def all_traces(cases: list[Case]) -> Traces:
    """The oracle of every family, batch and precision that occurs."""
    alone = {case.key: replace(case, mesh=MESHES[1][0], schedule="1f1b", recompute="none") for case in cases}
    return {key: train(make_config(case), case.batch, key[-1]) for key, case in alone.items()}


@pytest.fixture(scope="module")
def traces() -> Traces:
    (found,) = world.run(1, all_traces, [case for ranks in (1, 2, 4) for case in matrix(ranks)])
    untouched = [name for trace in found.values() for name, g in trace.gradients.items() if not g.any()]
    assert untouched == []
    return found


@pytest.mark.parametrize(
    ("ranks", "precisions"),
    [
        (1, PRECISIONS),
        (2, ("fp64",)),
        pytest.param(4, ("fp64",), marks=pytest.mark.slow),
        pytest.param(2, ("fp32",), marks=pytest.mark.slow),
        pytest.param(4, ("fp32",), marks=[pytest.mark.slow, pytest.mark.soak]),
    ],
)
def test_every_mesh_equals_one_process(ranks: int, precisions: tuple[str, ...], traces: Traces) -> None:
    """Law 1, ENG-2 to ENG-7, ENG-9, ENG-16, ENG-24 within T-2; prints the worst of each case."""
    cases = [case for case in matrix(ranks) if case.precision in precisions]
    hold(ranks, cases, traces)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", [0, *(pytest.param(k, marks=pytest.mark.soak) for k in range(1, 5))])
def test_eight_ranks_equal_one_process(part: int) -> None:
    """Law 1, T-4: three axes at a time, each axis alone, every schedule, dense and packed."""
    cases = WIDE[part::5]
    (traces,) = world.run(1, all_traces, cases)
    hold(8, cases, traces, timeout=800)


@pytest.mark.slow
def test_context_parallel_meshes_equal_one_process() -> None:
    """Law 1, ENG-21, ENG-22, ENG-24, PACK-5 to PACK-7: all meshes with cp, families, batches, precisions."""
    (traces,) = world.run(1, all_traces, [*MORE_CONTEXT[2], *MORE_CONTEXT[4]])
    for ranks, cases in MORE_CONTEXT.items():
        hold(ranks, cases, traces)


@pytest.mark.parametrize(
    ("device", "cases"),
    [
        pytest.param("cuda:0", SHARED, marks=pytest.mark.gpu),
        pytest.param("cpu", SHARED[3::7], marks=pytest.mark.slow),
    ],
    ids=["cuda", "cpu"],
)
def test_ranks_that_share_a_device_equal_one_process(device: str, cases: list[Case]) -> None:
    """Law 1 on one card: one rank by itself, and four over gloo, against the oracle on a CPU."""
    (traces,) = world.run(1, all_traces, cases)
    hold(4, [replace(case, device=device) for case in cases], traces)


def hold(ranks: int, cases: list[Case], traces: Traces, timeout: float = 200) -> None:
    """Every case is within its limits."""
    results = world.run(ranks, measure_all, cases, traces, timeout=timeout)[0]
    assert len(results) == len(cases)
    for case, what, distance in results:
        print(f"{case:56s} {distance:10.3g} of the limit, {what}")
    assert all(distance <= 1 for _, _, distance in results)


def test_mutations_are_noticed(traces: Traces) -> None:
    """T-5: under each fault the same comparison is off by more than a hundred limits."""
    results = world.run(2, measure_mutants, traces, timeout=200)[0]
    for name, (what, distance) in results.items():
        print(f"{name:16s} {distance:10.3g} of the limit, {what}")
    assert set(results) == set(MUTATIONS)
    assert [name for name, (_, distance) in results.items() if distance < 100] == []
