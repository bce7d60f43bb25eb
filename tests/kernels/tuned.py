"""Stands for a package of tuned kernels: Triton's own objects, in every order; reload it for fresh ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner


class Launches:
    """In the place of the compiled kernel: notes what would be launched."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def run(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append(kwargs)


TIMED: list[int] = []


def bench(call: Any, quantiles: Any) -> list[float]:
    """The most stages and the most warps are the fastest."""
    call()
    TIMED.append(1)
    seen = LAUNCHES.seen.pop()
    return [1 / (10 * seen["num_stages"] + seen["num_warps"])] * 3


LAUNCHES = Launches()


def configs() -> list[Any]:
    return [triton.Config({"TILE": 16}, warps, stages) for warps in (1, 2, 4, 8) for stages in (2, 3, 4)]


def plain(x, n, m, TILE: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x + tl.arange(0, TILE), n + m)


def even(values: dict[str, Any]) -> bool:
    return bool(values["n"] % 2 == 0)


class Foreign:
    """A wrapper that knows nothing of tuners; two of its properties fail."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    @property
    def configs(self) -> Any:
        raise RuntimeError("not built yet")

    @property
    def cache(self) -> Any:
        raise OSError("no such file")


class FromFile(Autotuner):
    """As fla's: winners come from a file of the package, read again at each call."""

    path: Path | None = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if self.path is not None:
            found = json.loads(self.path.read_text())
            self.cache[(args[1], *(str(a.dtype) for a in args if hasattr(a, "dtype")))] = triton.Config(
                **found
            )
        return super().run(*args, **kwargs)


jitted = triton.jit(plain)
tune = triton.autotune(configs(), key=["n"], do_bench=bench)
backward = triton.heuristics({"EVEN": even})(tune(jitted))
forward = Foreign(triton.autotune(configs(), key=["n"], do_bench=bench)(triton.jit(plain)))
inner = triton.autotune(configs(), key=["n"], do_bench=bench)(
    triton.heuristics({"EVEN": even})(triton.jit(plain))
)
from_file = FromFile(
    triton.jit(plain), ["x", "n", "m", "TILE", "EVEN"], configs(), ["n"], None, None, do_bench=bench
)
deep: Any = inner
for _ in range(8):
    deep = Foreign(deep)
too_deep = Foreign(deep)
circle = Foreign(None)
circle.fn = circle
untuned = triton.jit(plain)
pruned = triton.autotune(
    configs(),
    key=["n"],
    do_bench=bench,
    prune_configs_by={
        "early_config_prune": lambda offered, named, **rest: SEEN.append(list(offered)) or offered
    },
)(triton.jit(plain))
SEEN: list[list[Any]] = []
SEVERAL = (backward.fn, forward.fn, inner, from_file, pruned)
for tuner in SEVERAL:
    tuner.jit, tuner.fn = tuner.fn, LAUNCHES
