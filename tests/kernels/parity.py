"""An implementation against the reference in fp64 on the same rounded inputs (NUM-2, NUM-3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from src.kernels import opaque
from src.kernels.declaration import EAGER, Device, Implementation
from src.kernels.registry import implementations
from tests.kernels.examples import Example, examples

BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SLACK = 1e-6
"""Beyond twice the error of the reference in fp32, which may be exact by chance."""


def fitting(
    implementation: Implementation, described: Device, device: torch.device, dtype: torch.dtype
) -> list[Example]:
    """The examples that an implementation says it can run."""
    return [
        example
        for example in examples(implementation.operation, device, dtype)
        if implementation.missing(described, dtype, example.need, bitwise=False) is None
    ]


def pairwise(chosen: Sequence[Example]) -> list[Example]:
    """As few of the examples as hold each pair of abilities, each being there or not, that any of them holds.

    All of them where there are one or two abilities.
    """
    abilities = sorted({f for example in chosen for f in example.need.features})
    if len(abilities) < 3:
        return list(chosen)

    def pairs(example: Example) -> set[tuple[Any, ...]]:
        has = [(f, f in example.need.features) for f in abilities]
        return set(combinations(has, 2))

    left = {pair for example in chosen for pair in pairs(example)}
    found = []
    while left:
        best = max(chosen, key=lambda example: len(pairs(example) & left))
        found.append(best)
        left -= pairs(best)
    return found


@contextmanager
def switched(implementation: Implementation) -> Iterator[None]:
    """Torch's switch for deterministic algorithms is on, if the declaration counts on that."""
    torch.use_deterministic_algorithms(implementation.by_switch)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def run(function: Callable[..., Any], example: Example, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Outputs and the gradients of all graded inputs, for one upstream gradient; fp64 if `dtype` says so."""
    graded, others = (
        [x.to(dtype) if dtype and x.is_floating_point() else x for x in tensors]
        for tensors in (example.graded, example.others)
    )
    leaves = [x.detach().clone().requires_grad_() for x in graded]
    found = example.call(function, *leaves, *others)
    outputs = [found] if isinstance(found, Tensor) else list(found)
    if not leaves:
        return outputs
    generator = torch.Generator().manual_seed(1)
    roots = [x for x in outputs if x.requires_grad and x.is_floating_point()]
    ups = [torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in roots]
    return [x.detach() for x in outputs] + list(torch.autograd.grad(roots, leaves, ups))


def check(implementation: Implementation, example: Example, dtype: torch.dtype) -> None:
    """Values and every gradient within the bounds of NUM-2; raises AssertionError."""
    reference = implementations()[implementation.operation][EAGER].function
    exact, plain = run(reference, example, torch.float64), run(reference, example)
    found = run(implementation.function, example)
    assert len(found) == len(exact)
    for index, (ours, usual, want) in enumerate(zip(found, plain, exact, strict=True)):
        where = f"{implementation.operation}={implementation.name}, {example.name}, result {index}"
        assert ours.shape == want.shape, where
        assert ours.dtype == usual.dtype, where
        if not want.is_floating_point():
            assert torch.equal(ours, want), where
            continue
        error = relative(ours, want)
        twice = 2 * relative(usual, want)
        # Small inputs in bf16 leave the reference itself little room below the bound.
        limit = min(BOUND[dtype], twice + SLACK) if dtype == torch.float32 else max(BOUND[dtype], twice)
        assert error <= limit, f"{where}: {error} is more than {limit}"
    gradients = exact[len(exact) - len(example.graded) :] if example.graded else []
    empty = any(x.numel() == 0 for x in example.graded)
    assert empty or all(bool(g.any()) for g in gradients), f"{example.name}: a gradient that is all zero"


def twice(implementation: Implementation, example: Example, runs: int = 2) -> None:
    """DET-3: what is declared deterministic gives the same bits in every run."""
    forward, backward = implementation.deterministic
    first = run(implementation.function, example)
    outputs = len(first) - len(example.graded)
    for _ in range(runs - 1):
        again = run(implementation.function, example)
        for index, (a, b) in enumerate(zip(first, again, strict=True)):
            declared = forward if index < outputs else backward
            assert not declared or torch.equal(a, b), f"{example.name}, result {index} differs between runs"


def relative(x: Tensor, want: Tensor) -> float:
    """‖x − want‖ / ‖want‖; infinite with a NaN, and where all should be zero and is not."""
    x, want = x.double(), want.double()
    if not want.any():
        return 0.0 if not x.any() else float("inf")
    error = float((x - want).norm() / want.norm())
    return error if error == error else float("inf")


class Recorder(TorchDispatchMode):
    """Keeps the arguments of the first calls of each custom operation of ours."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "manyhead":
            kept = tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in args)
            # An empty input checks least, so another one takes its place.
            if func.name() not in self.calls or _is_empty(self.calls[func.name()][1]):
                self.calls[func.name()] = (func, kept)
        return func(*args, **(kwargs or {}))


def _is_empty(arguments: Sequence[Any]) -> bool:
    return any(isinstance(x, Tensor) and x.numel() == 0 for x in arguments)


@contextmanager
def as_if_compiling() -> Iterator[None]:
    """Calls go through the custom operations, as they do while a graph is traced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opaque, "torch", SimpleNamespace(compiler=SimpleNamespace(is_compiling=lambda: True)))
        yield


def recorded(implementation: Implementation, chosen: Sequence[Example]) -> Recorder:
    """The custom operations that an implementation issues, forward and backward."""
    recorder = Recorder()
    with as_if_compiling(), recorder:
        for example in chosen:
            run(implementation.function, example)
    return recorder


def opcheck(recorder: Recorder) -> None:
    """CMP-1: schema, fake and dynamic shapes of each operation that was recorded, on its own arguments."""
    for function, arguments in recorder.calls.values():
        has_fp8 = any(isinstance(x, Tensor) and x.dtype in FP8 for x in arguments)
        if has_fp8:
            _leaves_alone(function, arguments)
        schema = () if has_fp8 else ("test_schema",)
        torch.library.opcheck(
            function, arguments, test_utils=(*schema, "test_faketensor", "test_aot_dispatch_dynamic")
        )


def _leaves_alone(function: Any, arguments: Sequence[Any]) -> None:
    """What torch's check of a schema is about; it compares by arithmetic that 8 bits do not have."""
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    before = [x.view(torch.uint8).clone() if x.dtype in FP8 else x.clone() for x in tensors]
    found = function(*arguments)
    for x, old in zip(tensors, before, strict=True):
        assert torch.equal(x.view(torch.uint8) if x.dtype in FP8 else x, old), "an argument was written to"
        assert found.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or not found.numel()
