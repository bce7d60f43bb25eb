"""Bias-based balancing on meshes: the same bits everywhere, wide, frozen where it must be (ENG-25)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from src.config import BalanceConfig, MeshConfig, PrecisionConfig
from src.trainer.backends.native import NativeBackend
from src.trainer.parallel.balance import Unit
from src.trainer.parallel.shards import local
from src.trainer.runtime import Runtime, join
from tests.distributed import world
from tests.distributed.batches import step_batch
from tests.distributed.configs import MESHES, Case, make_config
from tests.distributed.mutations import wrapped
from tests.distributed.reference import sharpen

STEPS, RATE = 5, 1e-3
SINGLE = MESHES[1][0]
State = dict[str, Tensor]


def begin(case: Case) -> tuple[Runtime, NativeBackend]:
    """A backend under `balance=bias` with spread-out scores; no z-loss, whose units are micro-batches."""
    rank = dist.get_rank() if case.mesh.world > 1 else 0
    runtime = join(case.mesh, rank, rank, torch.device("cpu"))
    config = replace(make_config(case), balance=BalanceConfig(kind="bias", bias_rate=RATE))
    backend = NativeBackend.build(config, runtime)
    sharpen({n: view for n, e in backend.local_entries().items() for _, view in e.parts})
    return runtime, backend


def step(case: Case, runtime: Runtime, backend: NativeBackend, number: int, skip: float = 0.0) -> Tensor:
    """A step of SGD; returns the global counts."""
    batch = step_batch(case.batch, number, runtime.data_coordinate, runtime.mesh.data_ranks, case.block)
    mine = batch.target_tokens if runtime.counts_samples else 0
    sums = backend.forward_backward(batch, runtime.sum_world(torch.tensor(mine)))
    counts = runtime.sum_world(sums.counts.clone())
    for parameter in backend.parameters.values():
        local(parameter).sub_(0.5 * local(parameter.grad))
        parameter.grad = None
    backend.finish_step(torch.tensor(skip))
    return counts


def gathered(runtime: Runtime, backend: NativeBackend) -> State:
    """The biases of all layers; ranks that hold the same one must agree bitwise."""
    found: State = {}
    for part in runtime.gather_objects({name: row.clone() for name, row in backend.extra_state().items()}):
        for name, row in part.items():
            assert torch.equal(found.setdefault(name, row), row), name
    return found


def trained(case: Case) -> tuple[State, list[Tensor]]:
    """Biases after five steps, and the counts of each."""
    runtime, backend = begin(case)
    counts = [step(case, runtime, backend, number) for number in range(STEPS)]
    return gathered(runtime, backend), counts


def by_hand(counts: list[Tensor], names: list[str]) -> State:
    """The rule in exact fractions of counts, added up in the dtype of the bias."""
    biases = {name: [0.0] * counts[0].shape[1] for name in names}
    for counts_ME in counts:
        for name, row in zip(names, counts_ME.tolist(), strict=True):
            mean = Fraction(sum(row), len(row))
            for e, c in enumerate(row):
                biases[name][e] += RATE * ((mean > c) - (mean < c))
    return {name: torch.tensor(row, dtype=torch.float64) for name, row in biases.items()}


def cases(ranks: int) -> list[Case]:
    """Packed and padded samples on every mesh, with one and two micro-batches too; another family on one."""
    if ranks == 2:
        dp2, _, ep2, pp2 = MESHES[2]
        places = [(dp2, 4), (ep2, 4), (pp2, 24), (pp2, 12)]
        return [Case(mesh, "1f1b", "packed", "fp64", block=block) for mesh, block in places]
    meshes = [Case(mesh, "1f1b", "packed", "fp64", block=2) for mesh in MESHES[ranks]]
    return [*meshes, replace(meshes[0], family="qwen3_moe")]


def compared(ranks: int) -> dict[str, bool]:
    """Case → whether its biases are bitwise those of one process and of the rule, and all moved."""
    found: dict[str, bool] = {}
    oracles: dict[str, State] = {}
    for case in cases(ranks):
        if case.family not in oracles:
            biases, counts = trained(replace(case, mesh=SINGLE))
            oracles[case.family] = by_hand(counts, list(biases))
            assert all(torch.equal(biases[name], row) for name, row in oracles[case.family].items())
            assert all(bool(row.any()) for row in biases.values())
        biases, _ = trained(case)
        expected = oracles[case.family]
        found[str(case)] = biases.keys() == expected.keys() and all(
            torch.equal(biases[name], row) for name, row in expected.items()
        )
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_bias_is_the_same_on_every_mesh(ranks: int) -> None:
    """ENG-25: bitwise equal after five steps whatever the mesh and the number of micro-batches."""
    for found in world.run(ranks, compared, ranks, timeout=200):
        assert len(found) == len(cases(ranks))
        assert [case for case, is_equal in found.items() if not is_equal] == []


def local_counts() -> Any:
    """Every rank moves its bias by its own counts."""
    return mock.patch.object(Runtime, "reduce", lambda runtime, tensor, axes, op="sum": tensor)


def counted_pads() -> Any:
    """Rows of pads count as load."""

    def all_real(original: Any, unit: Unit, ids_TK: Tensor, experts: int) -> Tensor:
        with mock.patch.object(unit, "_real_BS", None):
            counts: Tensor = original(unit, ids_TK, experts)
        return counts

    return wrapped(Unit, "routed", all_real)


FAULTS: Mapping[str, tuple[Callable[[], Any], MeshConfig]] = {
    "local_counts": (local_counts, MESHES[2][0]),
    "counted_pads": (counted_pads, MESHES[2][3]),
}


def faulty() -> dict[str, bool]:
    """Fault → whether this rank's biases are still those of one process."""
    expected, _ = trained(Case(SINGLE, "1f1b", "packed", "fp64", block=4))
    found = {}
    for name, (fault, mesh) in FAULTS.items():
        case = Case(mesh, "1f1b", "packed", "fp64", block=4)
        runtime, backend = begin(case)
        with fault():
            for number in range(STEPS):
                batch = step_batch(case.batch, number, runtime.data_coordinate, mesh.data_ranks, case.block)
                backend.forward_backward(batch, torch.tensor(200))
                for parameter in backend.parameters.values():
                    parameter.grad = None
                backend.finish_step(torch.tensor(0.0))
        found[name] = all(torch.equal(expected[n], row) for n, row in backend.extra_state().items())
    return found


def test_faults_of_the_bias_are_noticed() -> None:
    """T-5: counts of one rank alone, and pads taken for load, give other biases."""
    assert world.run(2, faulty) == [dict.fromkeys(FAULTS, False)] * 2


def frozen() -> list[str]:
    """What fails of: skipped steps, evaluation and samples leave the bias, but use it; it stays wide."""
    problems = []
    for mesh in (SINGLE, MESHES[2][0]):
        for precision in ("fp32", "master", "bf16"):
            case = replace(Case(mesh, "1f1b", "packed", "fp32"), block=4)
            rank = dist.get_rank() if mesh.world > 1 else 0
            runtime = join(mesh, rank, rank, torch.device("cpu"))
            config = replace(
                make_config(case),
                balance=BalanceConfig(kind="bias"),
                precision=PrecisionConfig(name=precision),
            )
            backend = NativeBackend.build(config, runtime)
            bits = {name: torch.full_like(row, 1 + 2**-12) for name, row in backend.extra_state().items()}
            backend.load_extra_state(bits)
            batch = step_batch(case.batch, 0, runtime.data_coordinate, mesh.data_ranks, case.block)
            before = float(backend.evaluate(batch.micro_batches[0]))
            backend.logits(batch.micro_batches[0].ids_BS[:, :5])
            step(case, runtime, backend, 0, skip=1.0)
            held = backend.extra_state()
            if not all(row.dtype == torch.float32 and torch.equal(row, bits[n]) for n, row in held.items()):
                problems.append(f"{mesh.spec} {precision}: moved, or not wide")
            if precision == "fp32":
                backend = NativeBackend.build(config, runtime)
                if float(backend.evaluate(batch.micro_batches[0])) != before:
                    problems.append(f"{mesh.spec}: a bias equal for all changes the choice")
                backend.load_extra_state({n: torch.arange(len(row)) * 1.0 for n, row in bits.items()})
                if float(backend.evaluate(batch.micro_batches[0])) == before:
                    problems.append(f"{mesh.spec}: evaluation does not use the bias")
    return problems


def test_where_the_bias_is_frozen_and_wide() -> None:
    """ENG-25, ROUTE-6, EVAL-3: 1 + 2^-12 stays bit for bit through bf16, FSDP2 and skipped steps."""
    assert world.run(2, frozen) == [[]] * 2
