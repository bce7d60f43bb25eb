"""Forced choices of experts: what they are, and that no mesh changes them (DET-4, CKPT-8, MOE-1, law 1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from src.config import Config, MeshConfig
from src.models.decoder_layer import Router
from src.trainer.parallel import balance
from src.trainer.parallel.force import Force
from tests.distributed import world
from tests.distributed.batches import blocks
from tests.distributed.configs import CP2, DP2, EP2, PP2, SINGLE, Case, Key, make_config
from tests.distributed.laws import begin, measure_all, one_step
from tests.distributed.patches import wrapped
from tests.distributed.reference import Trace, train

CASES = [
    Case(EP2, "1f1b", "packed", "fp64", force="uniform"),
    Case(CP2, "1f1b", "packed12", "fp64", family="gpt_oss", force="even"),
]
MORE = [
    Case(DP2, "1f1b", "packed", "fp64", force="dirichlet"),
    Case(PP2, "1f1b", "packed", "fp64", family="gpt_oss", recompute="full", force="uniform"),
]
ALONE = [
    Case(SINGLE, "1f1b", "packed", "fp64", family="qwen3_moe", recompute="stage", force="dirichlet"),
]
WIDE = [
    Case(MeshConfig("pp2ep2", pp=2, ep=2), "dualpipev", "packed", "fp64", force="dirichlet"),
    Case(MeshConfig("cp2ep2", cp=2, ep=2), "1f1b", "packed12", "fp64", block=4, force="uniform"),
]
Traces = dict[Key, Trace]


def all_traces(cases: list[Case]) -> Traces:
    """The oracle of each, whose experts are chosen in plain integers."""
    alone = {case.key: replace(case, mesh=SINGLE, schedule="1f1b", recompute="none") for case in cases}
    return {key: train(make_config(case), case.batch, case.block) for key, case in alone.items()}


@pytest.fixture(scope="module")
def traces() -> Traces:
    """Those of `CASES`."""
    (found,) = world.run(1, all_traces, CASES)
    return found


def hold(ranks: int, cases: list[Case], traces: Traces) -> None:
    """Every case within its limits."""
    for what, off, distance in world.run(ranks, measure_all, cases, traces)[0]:
        print(f"{what:64s} {distance:10.3g} of the limit, {off}")
        assert distance <= 1, (what, off)


def config_of(force: str, **changes: Any) -> Config:
    return replace(make_config(Case(SINGLE, "1f1b", "dense", "fp64", force=force)), **changes)


def ids_of(force: str, tokens: Tensor, layer: int = 1, seed: int = 0) -> Tensor:
    return Force(config_of(force, seed=seed), [1, 2], torch.device("cpu")).ids(layer, tokens)


TOKENS = torch.arange(10_007) + (1 << 33)


def test_even_deals_the_experts_out_in_turn() -> None:
    """DET-4: token t goes to (t·K + j) mod E, so loads differ by one at most; no seed enters."""
    ids_TK = ids_of("even", TOKENS)
    want = [[(t * 3 + j) % 20 for j in range(3)] for t in TOKENS[:50].tolist()]
    assert ids_TK[:50].tolist() == want
    counts = ids_TK.flatten().bincount(minlength=20)
    assert int(counts.max() - counts.min()) <= 1
    assert torch.equal(ids_TK, ids_of("even", TOKENS, layer=2, seed=5))


@pytest.mark.parametrize("force", ["even", "uniform", "dirichlet"])
def test_choices_are_distinct_and_depend_on_the_token_alone(force: str) -> None:
    """CKPT-8: any part of the tokens in any order gets what it gets among all."""
    ids_TK = ids_of(force, TOKENS)
    assert ids_TK.dtype == torch.int32
    ordered = ids_TK.sort(1).values
    assert bool((ordered[:, 1:] > ordered[:, :-1]).all())
    assert 0 <= int(ordered.min()) <= int(ordered.max()) < 20
    part = torch.randperm(len(TOKENS), generator=torch.Generator().manual_seed(3))[:311]
    assert torch.equal(ids_of(force, TOKENS[part]), ids_TK[part])


@pytest.mark.parametrize("force", ["uniform", "dirichlet"])
def test_draws_differ_by_layer_and_seed(force: str) -> None:
    """SEED-1: a layer and a seed have draws of their own."""
    ids_TK = ids_of(force, TOKENS)
    for other in (ids_of(force, TOKENS, layer=2), ids_of(force, TOKENS, seed=1)):
        assert float((other == ids_TK).double().mean()) < 0.2


def test_uniform_is_uniform_in_every_place() -> None:
    """DET-4: each expert in each of the K places as often as any other, within five deviations."""
    ids_TK = ids_of("uniform", TOKENS)
    expected = len(TOKENS) / 20
    for k in range(3):
        counts = ids_TK[:, k].bincount(minlength=20).double()
        assert float((counts - expected).abs().max()) < 5 * expected**0.5


def test_dirichlet_is_skewed_as_its_popularity_says() -> None:
    """DET-4: the first choice falls on an expert as often as its popularity says."""
    force = Force(config_of("dirichlet"), [1, 2], torch.device("cpu"))
    popularity = force._popularity[1]
    shares = force.ids(1, TOKENS)[:, 0].bincount(minlength=20).double() / len(TOKENS)
    assert float((shares - popularity).abs().max()) < 5 * (0.25 / len(TOKENS)) ** 0.5
    assert float(popularity.max()) > 2 / 20


def test_law_1_holds_for_forced_choices(traces: Traces) -> None:
    """Law 1: experts and positions divided."""
    hold(2, CASES, traces)


@pytest.mark.slow
def test_law_1_holds_for_forced_choices_elsewhere() -> None:
    """Law 1, MOE-1: other axes, two at a time, another micro-batch size, activations computed again."""
    (found,) = world.run(1, all_traces, [*MORE, *ALONE, *WIDE])
    hold(1, ALONE, found)
    hold(2, MORE, found)
    hold(4, WIDE, found)


def without_place(original: Any, batch: Any, ring: Any) -> Tensor:
    """Tokens counted from the start of the micro-batch."""
    return original(replace(batch, first=0), ring)


def without_ring(original: Any, batch: Any, ring: Any) -> Tensor:
    """Positions counted from the start of the rank's own part."""
    return original(batch, None)


MUTATIONS = {
    "place": (lambda: wrapped(balance, "token_numbers", without_place), CASES[0]),
    "ring": (lambda: wrapped(balance, "token_numbers", without_ring), CASES[1]),
    "learned": (lambda: mock.patch.object(balance.BoundBalance, "forced", return_value=None), CASES[0]),
}


def measure_mutants(traces: Traces) -> dict[str, float]:
    """How far the counts of a first step are off under each fault, in limits."""
    found = {}
    for name, (patch, case) in MUTATIONS.items():
        with patch():
            runtime, backend, _ = begin(case, traces[case.key])
            report = one_step(case, runtime, backend, 0, traces[case.key])
        found[name] = report["counts 0"]
    return found


def test_mutations_are_noticed(traces: Traces) -> None:
    """T-5: a number of a token that depends on the mesh, and a choice that is not forced."""
    found = world.run(2, measure_mutants, traces)[0]
    assert set(found) == set(MUTATIONS)
    assert min(found.values()) > 100, found


def test_a_second_forward_keeps_the_choice(traces: Traces) -> None:
    """MOE-1, ENG-26: the router of a recomputation is handed the ids of the first forward."""
    case, seen = replace(CASES[0], mesh=SINGLE, recompute="full"), []

    def noting(original: Any, router: Router, x_TD: Tensor, batch: Any) -> Any:
        routing = original(router, x_TD, batch)
        seen.append(tuple(routing.ids_TK.flatten().tolist()))
        return routing

    with wrapped(Router, "forward", noting):
        runtime, backend, _ = begin(case, traces[case.key])
        one_step(case, runtime, backend, 0, traces[case.key])
    layers_and_blocks = 3 * len(blocks(case.batch, 0))
    assert len(seen) == 2 * layers_and_blocks
    assert len(set(seen)) == layers_and_blocks, "both forwards of a layer and micro-batch have one choice"


@pytest.mark.gpu
@pytest.mark.parametrize("force", ["even", "uniform", "dirichlet"])
def test_a_gpu_draws_what_a_cpu_does(force: str) -> None:
    """DET-4: integers wrap alike; logarithms may differ in the last place, their order does not."""
    device = torch.device("cuda", 0)
    there = Force(config_of(force), [1, 2], device).ids(1, TOKENS.to(device))
    assert torch.equal(there.cpu(), ids_of(force, TOKENS))
