"""Collectives of a step, idle experts, bad values, evaluation, imports (ENG-16, ENG-19, ENG-27, EVAL-3)."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from src.models.decoder_layer import Router
from src.models.layers import Experts, Linear
from src.trainer.backends.native import NativeBackend
from src.trainer.parallel.balance import BoundBalance
from src.trainer.parallel.shards import local
from src.trainer.runtime import Runtime, join, start
from tests.distributed import world
from tests.distributed.batches import BLOCK, LENGTH, step_batch
from tests.distributed.configs import MESHES, Case, make_config
from tests.distributed.laws import begin, measure, one_step, worst
from tests.distributed.patches import wrapped
from tests.distributed.reference import Recorder, train

COLLECTIVES = {
    "all_gather_into_tensor": "gather",
    "all_gather_single": "gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
}
"""Functions of `torch.distributed` that FSDP2 and we call, in 2.11 and 2.13 → what they do."""


def build(case: Case) -> tuple[Runtime, NativeBackend]:
    runtime = join(case.mesh, dist.get_rank(), dist.get_rank(), torch.device("cpu"))
    return runtime, NativeBackend.build(make_config(case), runtime)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Collectives of more than one rank that are issued, by name."""
    seen: Counter[str] = Counter()

    def wrap(name: str) -> Any:
        original = getattr(dist, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            group = keywords.get("group")
            seen[COLLECTIVES[name]] += group is None or dist.get_world_size(group) > 1
            return original(*arguments, **keywords)

        return mock.patch.object(dist, name, call)

    patches = [wrap(name) for name in COLLECTIVES if hasattr(dist, name)]
    for patch in patches:
        patch.start()
    try:
        yield seen
    finally:
        for patch in patches:
            patch.stop()


def count_collectives() -> dict[str, dict[str, int]]:
    """Mesh → collectives of a second step, the first having set everything up."""
    found = {}
    for mesh in MESHES[dist.get_world_size()]:
        case = Case(mesh, "1f1b", "packed", "fp64")
        runtime, backend = build(case)
        batch = step_batch(case.batch, 0, runtime.data_coordinate, mesh.data_ranks)
        backend.forward_backward(batch, torch.tensor(200))
        for parameter in backend.parameters.values():
            parameter.grad = None
        with counted() as seen:
            backend.forward_backward(batch, torch.tensor(200))
        found[mesh.spec] = {what: n for what, n in seen.items() if n}
    return found


def test_collectives_of_a_step() -> None:
    """ENG-16: a unit is gathered and reduced once a step, whatever the number of micro-batches.

    Units on one rank: 4 layers, 3 expert stacks, embedding, norm with head. Under ep2 the stacks are whole,
    and each of 6 micro-batches has 3 layers with 3 all-to-alls out, 1 back and 2 in backward.
    """
    two, _ = world.run(2, count_collectives)
    assert two["dp2"] == {"gather": 9, "reduce_scatter": 9}
    assert two["rep2"] == {"all_reduce": 9}
    assert two["ep2"] == {"gather": 6, "reduce_scatter": 6, "all_to_all": 6 * 3 * 6}
    assert two["pp2"] == {}


def fixed_choice(hooks: Any, layer: int) -> Tensor:
    """Every token to the same three experts, all on the first ep rank."""
    return torch.tensor([4, 1, 9], dtype=torch.int32).expand(BLOCK * LENGTH, -1).contiguous()


def idle_products(original: Any, experts: Experts, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
    """A rank without rows does not touch its experts at all, so that autograd gives them None."""
    out_RD: Tensor = original(experts, rows_RD, counts_E) if len(rows_RD) else rows_RD
    return out_RD


def idle_experts() -> tuple[str, float, int]:
    """Law 1 where most experts get no row, on a mesh where one rank gets none at all."""
    case = Case(next(m for m in MESHES[2] if m.spec == "ep2"), "1f1b", "dense", "fp64")
    with (
        mock.patch.object(BoundBalance, "forced", fixed_choice),
        mock.patch.object(Recorder, "forced", fixed_choice),
    ):
        trace = train(make_config(case), case.batch)
        with wrapped(Experts, "forward", idle_products):
            found = worst(measure(case, trace))
    return *found, sum(not g.any() for g in trace.gradients.values())


def test_idle_experts_get_zero_gradients() -> None:
    """ENG-19, T-3: all tokens to three experts leave zeros, not None, to the others, and law 1 holds."""
    for what, distance, untouched in world.run(2, idle_experts):
        assert distance <= 1, what
        assert untouched == 3 * 17 * 3


def bad_values() -> dict[str, list[bool]]:
    """Whether the norm is finite: as it is, with an infinite loss on rank 1, with a NaN element there."""
    found: dict[str, list[bool]] = {}
    for mesh in MESHES[2]:
        runtime, backend = build(Case(mesh, "1f1b", "dense", "fp32"))
        batch = step_batch("dense", 0, runtime.data_coordinate, mesh.data_ranks)
        sums = backend.forward_backward(batch, torch.tensor(288))
        infinite = torch.tensor(math.inf if runtime.rank == 1 else 0.0)
        norms = [backend.norm_and_loss(sums.loss)[0], backend.norm_and_loss(infinite)[0]]
        last = list(backend.parameters.values())[-1]
        if runtime.rank == 1:
            local(last.grad).view(-1)[-1] = math.nan
        norms.append(backend.norm_and_loss(sums.loss)[0])
        found[mesh.spec] = [bool(torch.isfinite(norm)) for norm in norms]
    return found


def test_every_rank_sees_a_bad_value() -> None:
    """ENG-27: an infinite loss of one rank, or NaN in a gradient, makes the norm not finite on all ranks.

    Replicas get their gradients from one sum, so a NaN on the second alone cannot be; its loss is its own.
    """
    for seen in world.run(2, bad_values):
        assert {spec: norms for spec, norms in seen.items() if spec != "rep2"} == {
            spec: [True, False, False] for spec in ("dp2", "ep2", "pp2")
        }
        assert seen["rep2"][:2] == [True, False]


def evaluation_between() -> list[bool]:
    """Whether a step after an evaluation and a sample gives the same bits as one without, on each mesh."""
    found = []
    for mesh in MESHES[2]:
        case = Case(mesh, "1f1b", "packed", "fp64")
        results = []
        for evaluates in (False, True):
            runtime, backend = build(case)
            batch = step_batch("packed", 0, runtime.data_coordinate, mesh.data_ranks)
            if evaluates:
                backend.evaluate(batch.micro_batches[0])
                backend.logits(batch.micro_batches[0].ids_BS[:, :5])
            sums = backend.forward_backward(batch, torch.tensor(200))
            results.append(
                [
                    sums.loss,
                    sums.aux,
                    sums.z,
                    sums.counts,
                    *(local(p.grad) for p in backend.parameters.values()),
                ]
            )
        found.append(all(torch.equal(a, b) for a, b in zip(*results, strict=True)))
    return found


def test_evaluation_leaves_no_trace() -> None:
    """EVAL-3: loss, auxiliary sums, counts and gradients are bitwise those without an evaluation before."""
    assert world.run(2, evaluation_between) == [[True] * 4] * 2


def mixed_step(precision: str) -> tuple[float, float, set[str]]:
    """Loss and norm of a step on one rank, and the dtypes of parameters in forward and of gradients."""
    case = Case(MESHES[1][0], "1f1b", "dense", precision)
    runtime = start(make_config(case))
    backend = NativeBackend.build(make_config(case), runtime)
    seen: set[str] = set()
    with ExitStack() as stack:
        for kind in (Router, Linear, Experts):
            stack.enter_context(wrapped(kind, "forward", witness(kind.__name__, seen)))
        sums = backend.forward_backward(step_batch("dense", 0, 0, 1), torch.tensor(288))
    seen |= {f"gradient {local(p.grad).dtype}" for p in backend.parameters.values()}
    stacks = [local(p.grad) for name, p in backend.parameters.items() if backend.specs[name].expert]
    seen |= {f"sums in bf16 {torch.equal(g, g.bfloat16().float())}" for g in stacks}
    found = float(sums.loss), float(backend.norm_and_loss(sums.loss)[0]), seen
    runtime.close()
    return found


def witness(name: str, seen: set[str]) -> Any:
    """A wrapper of `forward` that notes the dtype of the module's parameters."""

    def look(original: Any, module: Any, *arguments: Any) -> Any:
        seen.update(f"{name} {parameter.dtype}" for parameter in module.parameters(recurse=False))
        return original(module, *arguments)

    return look


def test_masters_stay_in_fp32() -> None:
    """MOD-4, ENG-3: under `master` products run in bf16, router and sums of gradients in fp32, alone.

    The limit of the loss is below what 1/N_tok in bf16 would do: 1/288 is off by a five-hundredth there.
    """
    (loss, norm, _), (mixed_loss, mixed_norm, dtypes) = (
        world.run(1, mixed_step, precision)[0] for precision in ("fp32", "master")
    )
    assert dtypes == {
        "Router torch.float32",
        "Linear torch.bfloat16",
        "Experts torch.bfloat16",
        "gradient torch.float32",
        "sums in bf16 False",
    }
    assert mixed_loss == pytest.approx(loss, rel=1e-4)
    assert mixed_norm == pytest.approx(norm, rel=1e-3)


def lagged_state() -> bool:
    """A lagged f saved after a step and loaded elsewhere gives the same second step."""
    case = Case(MESHES[1][0], "1f1b", "packed", "fp64")
    trace = train(make_config(case), case.batch)
    runtime, backend, _ = begin(case, trace)
    one_step(case, runtime, backend, 0, trace)
    saved = {name: tensor.clone() for name, tensor in backend.extra_state().items()}
    _, other, _ = begin(case, trace)
    other.load_extra_state(saved)
    pairs = zip(other.extra_state().values(), backend.extra_state().values(), strict=True)
    return len(saved) == 3 and all(torch.equal(a, b) for a, b in pairs)


def test_lagged_share_is_saved() -> None:
    """CKPT-1: global f is part of the state, by layer."""
    assert world.run(1, lagged_state) == [True]


def what_is_imported() -> list[str]:
    """Slow modules that a step on one rank brought in."""
    case = Case(MESHES[1][0], "1f1b", "dense", "fp32")
    backend = NativeBackend.build(make_config(case), join(case.mesh, 0, 0, torch.device("cpu")))
    backend.forward_backward(step_batch("dense", 0, 0, 1), torch.tensor(288))
    slow = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch._inductor")
    return [name for name in slow if name in sys.modules]


def test_one_rank_imports_nothing_distributed() -> None:
    """A rank alone pays for neither FSDP nor pipelining at start-up."""
    import subprocess

    code = "from tests.distributed.test_engine import what_is_imported; print(what_is_imported())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
