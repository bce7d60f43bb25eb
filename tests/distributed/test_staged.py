"""Operations with a graph each, recomputation, weight gradients put off (ENG-10 to 12, ENG-15, ENG-26)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from src.config import Config, DebugConfig, PipelineConfig, PrecisionConfig, RecomputeConfig
from src.kernels.linear import linear
from src.models.decoder_layer import Router
from src.models.protocol import Batch
from src.trainer.backends.native import NativeBackend
from src.trainer.data.batch import StepBatch
from src.trainer.parallel.pipeline import staged
from src.trainer.parallel.pipeline.deferral import Deferral, settle
from src.trainer.parallel.pipeline.executor import Sequential
from src.trainer.parallel.pipeline.program import Program
from src.trainer.parallel.pipeline.tape import Tape, Value
from src.trainer.runtime import join
from tests.distributed.batches import step_batch
from tests.distributed.configs import MESHES, MODELS, Case, make_config
from tests.distributed.mutations import wrapped

SINGLE = MESHES[1][0]


class PutOff(Sequential):
    """Every weight gradient waits until all backwards are done, the newest micro-batch's longest."""

    def run(self, program: Program, after: Callable[[], None], reduce: Callable[[], None]) -> None:
        for index in range(self._count):
            program.forward(0, index, None)
        for index in range(self._count):
            program.backward(0, index, None, defer=True)
            after()
        for index in range(self._count):
            program.weights(0, index)
            after()
        reduce()


def config(family: str = "deepseek_v2", batch: str = "packed", **changes: Any) -> Config:
    """A run on one rank, staged unless said otherwise."""
    made = make_config(Case(SINGLE, "1f1b", batch, "fp32", family=family))
    usual = {"pipeline": PipelineConfig(program="staged"), "global_batch_size": 6}
    return replace(made, **usual | changes)


def backend_of(config: Config, executor: type[Sequential] = Sequential) -> NativeBackend:
    defers = executor is PutOff
    with mock.patch("src.trainer.parallel.layout.defers", return_value=defers):
        backend = NativeBackend.build(config, join(SINGLE, 0, 0, torch.device("cpu")))
    backend._executor = executor(backend._micro_batches)
    return backend


def first(batch: StepBatch, count: int) -> StepBatch:
    """Its first micro-batches."""
    return replace(batch, micro_batches=batch.micro_batches[:count])


def outcome(config: Config, executor: type[Sequential] = Sequential) -> dict[str, Tensor]:
    """Sums and gradients of a step."""
    backend = backend_of(config, executor)
    kind = "packed" if config.balance.kind == "micro_batch" else "dense"
    batch = first(step_batch(kind, 0, 0, 1), backend._micro_batches)
    sums = backend.forward_backward(batch, torch.tensor(batch.target_tokens))
    found = {f"gradient {n}": p.grad for n, p in backend.parameters.items() if p.grad is not None}
    assert len(found) == len(backend.parameters)
    assert sums.counts is not None
    return found | {"loss": sums.loss, "aux": sums.aux, "z": sums.z, "counts": sums.counts}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """What is not bitwise equal."""
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("batch", ["dense", "packed"])
def test_staged_recomputed_and_put_off_equal_plain_bitwise(family: str, batch: str) -> None:
    """ENG-10, ENG-11, ENG-15, ENG-26 in fp32: loss, every gradient, auxiliary sums and counts."""
    plain = outcome(config(family, batch, pipeline=PipelineConfig(program="plain")))
    for name in ("none", "stage", "full"):
        made = config(family, batch, recompute=RecomputeConfig(name), debug=DebugConfig(poison=True))
        assert differing(plain, outcome(made)) == [], name
        assert differing(plain, outcome(made, PutOff)) == [], f"{name}, put off"


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_merged_boundaries_equal_plain_for_any_stage_size(layers: int) -> None:
    """ENG-11: a stage of one layer has no boundary inside, one of three has two."""
    model = replace(MODELS["deepseek_v2"], num_layers=layers)
    plain = outcome(config(model=model, pipeline=PipelineConfig(program="plain")))
    assert differing(plain, outcome(config(model=model))) == []


@contextmanager
def noisy() -> Iterator[None]:
    """Routers whose logits get fresh noise in every call."""
    generator = torch.Generator().manual_seed(5)

    def forward(original: Any, router: Router, x_TD: Tensor, batch: Batch) -> Any:
        noise = torch.randn(x_TD.shape[0], router.weight.shape[0], generator=generator)
        plain = router.ops
        router.ops = replace(plain, router_linear=lambda x, w: plain.router_linear(x, w) + 5 * noise)
        try:
            return original(router, x_TD, batch)
        finally:
            router.ops = plain

    with wrapped(Router, "forward", forward):
        yield


@pytest.mark.parametrize("mode", ["stage", "full"])
def test_eng_26_a_second_forward_keeps_the_routes(mode: str) -> None:
    """Noise in the second call changes neither routes nor counts; `reroute` is what it would be otherwise."""

    def ids(patch: Any) -> list[tuple[Tensor, ...]]:
        seen: dict[int, list[Tensor]] = {}

        def record(original: Any, layer: Any, hidden: Tensor, batch: Batch) -> Any:
            found = original(layer, hidden, batch)
            if found[1] is not None:
                seen.setdefault(id(layer), []).append(found[1].ids_TK)
            return found

        with patch, noisy(), wrapped(staged.Visit, "__init__", _one_micro_batch(record)):
            outcome(config(recompute=RecomputeConfig(mode), global_batch_size=2))
        return [tuple(pair) for pair in seen.values()]

    kept = ids(nullcontext())
    assert kept
    assert all(len(pair) == 2 and torch.equal(*pair) for pair in kept)
    reroute = wrapped(Batch, "again", lambda original, batch, ids_TK: original(batch, None))
    assert not all(torch.equal(*pair) for pair in ids(reroute))


def _one_micro_batch(record: Any) -> Any:
    """Visits whose layer's attention is recorded."""

    def init(original: Any, visit: Any, layer: Any, *arguments: Any) -> None:
        class Recorded:
            is_moe = layer.is_moe
            experts, aggregate = staticmethod(layer.experts), staticmethod(layer.aggregate)

            @staticmethod
            def attend(hidden: Tensor, batch: Batch) -> Any:
                return record(lambda _, h, b: layer.attend(h, b), layer, hidden, batch)

        original(visit, Recorded(), *arguments)

    return init


def test_eng_12_a_read_after_release_shows() -> None:
    """Buffers that weight gradients still read are not released; released too early they give NaN."""
    made = config(debug=DebugConfig(poison=True))
    backward = staged.Staged.backward

    def early(program: Any, stage: int, micro_batch: int, gradient: Any, defer: bool) -> Any:
        found = backward(program, stage, micro_batch, gradient, defer)
        program._flights[stage, micro_batch].tape.release()
        return found

    with mock.patch.object(staged.Staged, "backward", early):
        found = outcome(made, PutOff)
    assert any(not bool(value.isfinite().all()) for value in found.values())


def test_lost_w_is_noticed() -> None:
    """T-5 `lost_w`: without the last weight gradient put off, gradients differ."""
    plain = outcome(config(pipeline=PipelineConfig(program="plain")))

    def lose(waiting: Any) -> None:
        weight, _ = waiting.pop()
        settle([*waiting, (weight, lambda: torch.zeros_like(weight))])

    with mock.patch.object(staged, "settle", lose):
        assert differing(plain, outcome(config(), PutOff))


def test_a_record_goes_backward_once() -> None:
    """ENG-11: neither an operation nor a gradient is used twice."""
    tape = Tape(poison=False)
    start = Value(torch.ones(3))
    (out,) = tape.call(lambda x, again: (2 * x,), [start])
    _, record = tape._records[0]
    out.give(torch.ones(3))
    tape.backward()
    assert torch.equal(start.take(), torch.full((3,), 2.0))
    with pytest.raises(AssertionError, match="twice"):
        record.backward()
    with pytest.raises(AssertionError, match="twice"):
        out.give(torch.ones(3))


def test_one_engine_call_per_operation() -> None:
    """ENG-11: per micro-batch one call for each operation of the stage, recomputed or not."""
    made = config(global_batch_size=2, recompute=RecomputeConfig("stage"))
    kinds = [layer >= 1 for layer in range(made.model.num_layers)]
    expected = sum(3 if is_moe else 2 for is_moe in kinds) + 1  # Rows that are home are not brought home.
    with mock.patch.object(torch.autograd, "backward", wraps=torch.autograd.backward) as calls:
        outcome(made)
    assert calls.call_count == expected


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "stage", "full"])
@pytest.mark.parametrize("executor", [Sequential, PutOff])
def test_eng_30_nothing_of_a_step_outlives_it(mode: str, executor: type[Sequential]) -> None:
    """Live tensors are as many after 12 steps as after 3."""
    backend = backend_of(config(recompute=RecomputeConfig(mode), global_batch_size=4), executor)
    counts = {}
    for step in range(1, 13):
        batch = first(step_batch("packed", step % 2, 0, 1), 2)
        backend.forward_backward(batch, torch.tensor(batch.target_tokens))
        for parameter in backend.parameters.values():
            parameter.grad = None
        if step in (3, 12):
            gc.collect()
            counts[step] = sum(Tensor in type(o).__mro__ for o in gc.get_objects())
    assert counts[3] == counts[12]


def bf16_error(micro_batches: int, executor: type[Sequential]) -> float:
    """Relative error of all weight gradients under fp32 masters against fp32 throughout."""
    size = {"micro_batch_size": 2, "global_batch_size": 2 * micro_batches}
    small = {"model": replace(MODELS["qwen3_moe"], num_layers=1, mlp_only_layers=[0])} | size
    batches = [step_batch("dense", step, 0, 1).micro_batches for step in range(-(-micro_batches // 12))]
    batch = replace(
        step_batch("dense", 0, 0, 1), micro_batches=tuple(m for b in batches for m in b)[:micro_batches]
    )
    found = []
    for precision in ("master", "fp32"):
        made = config("qwen3_moe", "dense", precision=PrecisionConfig(precision), **small)
        backend = backend_of(made, executor)
        with torch.no_grad():
            for parameter in backend.parameters.values():
                parameter.copy_(parameter.bfloat16())
        backend.local_entries()
        backend.forward_backward(batch, torch.tensor(batch.target_tokens))
        found.append({n: p.grad.float() for n, p in backend.parameters.items() if p.grad is not None})
    low, high = found
    name = "model.layers.0.mlp.down_proj.weight"
    return float((low[name] - high[name]).norm() / high[name].norm())


def test_eng_15_gradients_of_many_micro_batches_add_up_in_fp32() -> None:
    """The error of bf16 compute does not grow with micro-batches put off; folded late it does."""
    few, many = bf16_error(4, PutOff), bf16_error(64, PutOff)
    print(f"relative error of a weight's gradient: {few:.2e} with 4 micro-batches, {many:.2e} with 64")
    assert many <= 1.5 * few

    with mock.patch.object(NativeBackend, "_collect", _only_at_the_end()):
        late = bf16_error(64, PutOff)
    print(f"added in bf16: {late:.2e}")
    assert late > 1.5 * many


def _only_at_the_end() -> Callable[[NativeBackend], None]:
    """Gradients stay in bf16 until the 128th call: 64 backwards, 64 weight gradients."""
    original, calls = NativeBackend._collect, {}

    def collect(backend: NativeBackend) -> None:
        calls[id(backend)] = calls.get(id(backend), 0) + 1
        if calls[id(backend)] % 128 == 0:
            original(backend)

    return collect


def test_a_projection_asks_before_its_weight_gradient() -> None:
    """`linear` with a taker gives autograd's gradients bitwise, at once and later."""
    x, weight, bias = (torch.randn(*s, requires_grad=True) for s in ((3, 5, 7), (4, 7), (4,)))
    linear(x, weight, bias).square().sum().backward()
    expected = [t.grad.clone() for t in (x, weight, bias)]
    deferral, waiting = Deferral(), []
    for inside in (nullcontext(), deferral.collect(waiting)):
        for tensor in (x, weight, bias):
            tensor.grad = None
        with inside:
            linear(x, weight, bias, later=deferral).square().sum().backward()
        assert (weight.grad is None) == bool(waiting)
        settle(waiting)
        assert all(
            torch.allclose(t.grad, e, rtol=1e-6, atol=1e-6)
            for t, e in zip((x, weight, bias), expected, strict=True)
        )
