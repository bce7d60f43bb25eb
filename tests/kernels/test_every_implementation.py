"""REG-5: what every implementation of the registry owes, by what it declares; nothing here names one.

On a CPU the ones of its own run, those in Triton in the interpreter, the rest on tensors without data; with a
GPU all that it can run, in fp32 and bf16.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from src.kernels import swiglu
from src.kernels.declaration import EAGER, Device, Implementation
from src.kernels.opaque import opaque
from src.kernels.registry import describe, implementations
from tests.kernels import interpreted, parity
from tests.kernels.examples import EXAMPLES, Example, examples

CPU, META = torch.device("cpu"), torch.device("meta")
EVERY = [i for known in implementations().values() for i in known.values()]
DTYPES = (torch.float32, torch.bfloat16)
OURS = [i for i in EVERY if i.source == "triton"]
HERE = describe(CPU)


def label(value: Any) -> str | None:
    return f"{value.operation}={value.name}" if isinstance(value, Implementation) else str(value)


each = partial(pytest.mark.parametrize, "implementation", ids=label)


def made_for(implementation: Implementation) -> Device:
    """A device with all that an implementation asks for, made up."""
    kind = min(implementation.devices or {"cpu"})
    arch = min(implementation.archs or {"sm90" if kind == "cuda" else kind})
    there = {package: lowest(versions) for package, versions in implementation.packages.items()}
    return Device(kind, arch, packages=there)


def lowest(specifier: str) -> str:
    """The version after `>=`."""
    return next(part[2:] for part in specifier.split(",") if part.startswith(">="))


def fitting(implementation: Implementation, device: torch.device, dtype: torch.dtype) -> list[Example]:
    return parity.fitting(implementation, made_for(implementation), device, dtype)


def elsewhere() -> list[Implementation]:
    """Neither for this CPU nor for the interpreter."""
    return [i for i in EVERY if i.source != "triton" and i.devices is not None and HERE.kind not in i.devices]


NEEDS_DATA = ("flex_attention",)
"""Operations of torch that refuse tensors without data; `test_attention_flex.py` runs them on a CPU."""


@each(EVERY)
def test_reg_5_some_example_fits(implementation: Implementation) -> None:
    """A shape, feature or dtype that no example has would go without a test."""
    assert any(fitting(implementation, META, dtype) for dtype in DTYPES)
    claimed = {f for e in examples(implementation.operation, META, DTYPES[0]) for f in e.need.features}
    engine = {
        "context_parallel",
        "biased_experts",
        "fp8_experts",
    }  # How the layer calls it, not what it computes.
    assert implementation.features - engine <= claimed


def test_reg_5_every_operation_has_examples() -> None:
    assert set(EXAMPLES) == set(implementations())


@each([i for i in EVERY if i not in OURS and i not in elsewhere()])
def test_reg_5_parity_on_a_cpu(implementation: Implementation) -> None:
    """NUM-2, NUM-3: values and every gradient; DET-3: two runs; CMP-1: its custom operations."""
    chosen = parity.fitting(implementation, HERE, CPU, torch.float32)
    if not chosen:
        assert implementation.packages
        pytest.skip(f"{implementation.packages} are not installed")
    for example in chosen:
        parity.check(implementation, example, torch.float32)
        parity.twice(implementation, example)
    parity.opcheck(parity.recorded(implementation, chosen))


@pytest.fixture(scope="module")
def found() -> interpreted.Findings:
    """Of the process with Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is there on Linux only")
    return interpreted.find()


@each(OURS)
def test_int_1_parity_in_the_interpreter(implementation: Implementation, found: interpreted.Findings) -> None:
    """INT-1, CMP-1: values, every gradient and the custom operations of our kernels."""
    assert found.tried[f"{implementation.operation}={implementation.name}"] is None


@pytest.mark.parametrize("limit", interpreted.limits())
def test_int_1_limits_of_the_interpreter(limit: str, found: interpreted.Findings) -> None:
    """INT-1: each shortcoming is still there, and what kernels use works."""
    assert found.tried[limit] is None


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        (i, dtype)
        for i in elsewhere()
        for dtype in DTYPES
        if (i.dtypes is None or dtype in i.dtypes) and i.name not in NEEDS_DATA
    ],
    ids=label,
)
def test_reg_5_shapes_of_what_needs_a_gpu(implementation: Implementation, dtype: torch.dtype) -> None:
    """Without data: results and gradients have the shapes and dtypes of the reference's."""
    reference = implementations()[implementation.operation][EAGER].function
    with parity.as_if_compiling():
        for example in fitting(implementation, META, dtype):
            ours, theirs = (parity.run(f, example) for f in (implementation.function, reference))
            assert [(x.shape, x.dtype) for x in ours] == [(x.shape, x.dtype) for x in theirs], example.name


def test_cmp_1_every_custom_operation_is_reached(found: interpreted.Findings) -> None:
    """CMP-1: none is left out of `opcheck`; those for a GPU are checked there, and reached here."""
    reached = set(found.operations)
    for implementation in (i for i in EVERY if i not in OURS and i.name not in NEEDS_DATA):
        device, described = (META, made_for(implementation)) if implementation in elsewhere() else (CPU, HERE)
        for dtype in DTYPES:
            chosen = parity.fitting(implementation, described, device, dtype)
            reached |= set(parity.recorded(implementation, chosen[-4:]).calls)
    names = torch._C._dispatch_get_all_op_names()
    assert reached == {name for name in names if name.startswith("manyhead::") and "mutant" not in name}


def shifted(x: Tensor) -> Tensor:
    return swiglu.swiglu(x) + 1e-3


def without_gradient_of_up(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return swiglu.swiglu(torch.cat((gate, up.detach()), -1))


def unsteady(x: Tensor) -> Tensor:
    return swiglu.swiglu(x) * (1 + 1e-5 * torch.rand(()))


@pytest.mark.parametrize("mutant", [shifted, without_gradient_of_up])
def test_reg_5_mutation_what_is_wrong_is_seen(mutant: Any) -> None:
    wrong = replace(implementations()["swiglu"][EAGER], function=mutant)
    with pytest.raises(AssertionError, match="swiglu=eager, 5x37, result"):
        parity.check(wrong, examples("swiglu", CPU, torch.float32)[0], torch.float32)


def test_det_3_mutation_two_runs_that_differ_are_seen() -> None:
    loose = replace(implementations()["swiglu"][EAGER], function=unsteady)
    example = examples("swiglu", CPU, torch.float32)[0]
    with pytest.raises(AssertionError, match="differs between runs"):
        parity.twice(loose, example)
    parity.twice(replace(loose, deterministic=(False, False)), example)


def test_cmp_1_mutation_a_wrong_shape_is_seen() -> None:
    schema = "(Tensor x) -> Tensor"
    mutant = opaque("mutant_shape", schema, torch.clone, lambda x: x.new_empty(x.shape[0] + 1, 2))
    wrong = replace(implementations()["swiglu"][EAGER], function=lambda x: mutant(x.detach()) + 0 * x)
    recorder = parity.recorded(wrong, examples("swiglu", CPU, torch.float32)[:1])
    assert list(recorder.calls) == ["manyhead::mutant_shape"]
    with pytest.raises(Exception, match="mutant_shape"):
        parity.opcheck(recorder)


def on_the_card(implementation: Implementation, dtype: torch.dtype) -> list[Example]:
    """Of the examples that this GPU takes those with every pair of abilities; none is a reason to skip.

    A kernel that is compiled at its first call takes half a minute for each new pair.
    """
    torch.compiler.reset()
    cuda = torch.device("cuda")
    chosen = parity.pairwise(parity.fitting(implementation, describe(cuda), cuda, dtype))
    if not chosen:
        pytest.skip(f"no example of {label(implementation)} in {dtype} runs on this card")
    return chosen


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each(EVERY)
def test_reg_5_parity_on_a_gpu(implementation: Implementation, dtype: torch.dtype) -> None:
    chosen = on_the_card(implementation, dtype)
    for example in chosen:
        parity.check(implementation, example, dtype)
    parity.opcheck(parity.recorded(implementation, chosen))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each([i for i in EVERY if any(i.deterministic)])
def test_det_3_runs_beside_a_busy_stream_are_equal(
    implementation: Implementation, dtype: torch.dtype
) -> None:
    """DET-3: three runs give the same bits where that is declared."""
    chosen = on_the_card(implementation, dtype)
    other, x = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        for _ in range(200):
            x = torch.mm(x, x).clamp_(-1, 1)
    with parity.switched(implementation):
        for example in chosen:
            parity.twice(implementation, example, runs=3)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each([i for i in EVERY if i.name != EAGER])
def test_bench_5_nothing_waits_for_the_device(implementation: Implementation, dtype: torch.dtype) -> None:
    """Rule (d) of the operations: forward and backward, once warm, read nothing back."""
    chosen = on_the_card(implementation, dtype)
    prepared = [[x.detach().requires_grad_() for x in example.graded] for example in chosen]
    for mode in ("default", "error"):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for example, leaves in zip(chosen, prepared, strict=True):
                out = example.call(implementation.function, *leaves, *example.others)
                roots = [x for x in ([out] if isinstance(out, Tensor) else out) if x.requires_grad]
                if roots:
                    torch.autograd.grad(roots, leaves, [torch.ones_like(x) for x in roots])
        finally:
            torch.cuda.set_sync_debug_mode("default")
