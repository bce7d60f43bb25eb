"""This working tree against another commit or directory: time of a step, peak memory, first losses.

    python scripts/bench_compare.py HEAD~1 --cases tiny
    python scripts/bench_compare.py ../other-checkout --cases deepseek_v2_lite_8l,qwen3_30b_8l precision=bf16

Each block is a run of train.py in a process of its own, with the code of one side; sides alternate. What both
must have is the case and the overrides. A difference inside that of a side's own blocks is called none. The
worktree of the commit and all runs are removed at the end, also after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from src.bench.clock import spread
from src.bench.trees import Tree, base_tree, ending_in_order, head_tree, train
from src.errors import UserError

CURVE = 20
"""First losses that are compared."""
QUIET = ("evaluation=none", "checkpoint.every=0", "checkpoint.final=false", "launcher.force=true")
"""Overrides of every run: nothing but steps. Whether a model fits is found out by trying."""


@dataclass
class Blocks:
    """What the runs of one side came to."""

    tree: Tree
    medians: list[float] = field(default_factory=list)
    """Milliseconds a step of each run."""
    peaks: list[float] = field(default_factory=list)
    """GiB of each run: allocated on a GPU, of the process on a CPU."""
    curves: list[list[float]] = field(default_factory=list)
    """First losses of each run."""

    def add(self, run: Path, warmup: int) -> None:
        """Read a finished run; its first `warmup` steps are not timed."""
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        self.medians.append(1e3 * statistics.median(line["step_time"] for line in lines[warmup:]))
        self.peaks.append(max(line["mem_peak_bytes"] for line in lines) / 2**30)
        self.curves.append([float(line["loss"]) for line in lines[:CURVE]])


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; the code of a UserError, else 0."""
    arguments = parser().parse_intermixed_args(argv)
    head = head_tree()
    try:
        with (
            ending_in_order(),
            tempfile.TemporaryDirectory(prefix="bench_compare_", ignore_cleanup_errors=True) as scratch,
            base_tree(arguments.base, Path(scratch)) as base,
        ):
            for case in arguments.cases.split(","):
                sides = Blocks(head), Blocks(base)
                alternate(case, sides, arguments, Path(scratch) / "runs")
                print("\n".join([f"\n{case}", *report(*sides)]), flush=True)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("interrupted: worktree and runs are removed", file=sys.stderr)
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("base", help="a commit, or a directory with a checkout")
    found.add_argument("--cases", default="tiny", help="files of conf/experiment/bench, by commas")
    found.add_argument("--blocks", type=int, default=3, help="runs a side, in turn")
    found.add_argument("--steps", type=int, default=20, help="timed steps of a run")
    found.add_argument("--warmup", type=int, default=10, help="steps of a run before")
    found.add_argument("overrides", nargs="*", help="overrides for both sides, as for train.py")
    return found


def alternate(case: str, sides: tuple[Blocks, Blocks], arguments: argparse.Namespace, runs: Path) -> None:
    """Runs A B A B …, each read when it is done."""
    steps = max(CURVE, arguments.warmup + arguments.steps)
    words = [f"experiment=bench/{case}", f"max_steps={steps}", *QUIET, *arguments.overrides]
    for block in range(arguments.blocks):
        for place, side in enumerate(sides):
            run = train(side.tree, words, runs / f"{case}-{block}-{'ab'[place]}")
            side.add(run, arguments.warmup)
            print(f"{side.tree.name:<32} block {block + 1}: {side.medians[-1]:9.2f} ms a step", flush=True)


def report(head: Blocks, base: Blocks) -> list[str]:
    """The three numbers, each with its verdict."""
    return [
        f"A  {head.tree.name}",
        f"B  {base.tree.name}",
        _row("step, ms", head.medians, base.medians, ("faster", "slower")),
        _row("peak, GiB", head.peaks, base.peaks, ("less", "more")),
        f"loss of {len(head.curves[0])} steps   {curve_verdict(head, base)}",
    ]


def _row(what: str, a: Sequence[float], b: Sequence[float], words: tuple[str, str]) -> str:
    """Medians of both sides, how far they lie apart, and whether that is more than a side from itself."""
    one, two = statistics.median(a), statistics.median(b)
    noise = max(spread(a), spread(b))
    return f"{what:<10} A {one:10.3f}   B {two:10.3f}   {verdict(one / two - 1, noise, words)}"


def verdict(change: float, noise: float, words: tuple[str, str]) -> str:
    """A is so much less or more than B, or no difference where a side's own blocks lie as far apart."""
    told = f"A {abs(change):.1%} {words[change > 0]}"
    return f"none ({told}, noise {noise:.1%})" if abs(change) <= noise else f"{told} (noise {noise:.1%})"


def curve_verdict(head: Blocks, base: Blocks) -> str:
    """How far the losses lie apart at most, beside how far those of one side do from run to run."""
    apart, step = furthest(head.curves[0], base.curves[0])
    noise = max(furthest(side.curves[0], curve)[0] for side in (head, base) for curve in side.curves)
    if apart == 0:
        return "equal bit for bit"
    told = f"A and B {apart:.2g} of the loss apart at step {step} (noise {noise:.2g})"
    return f"none ({told})" if apart <= noise else told


def furthest(one: Sequence[float], two: Sequence[float]) -> tuple[float, int]:
    """The largest relative difference and its step; a value that is not finite differs from any other."""
    pairs = enumerate(zip(one, two, strict=True), start=1)
    return max(((_relative(a, b), step) for step, (a, b) in pairs), key=lambda found: found[0])


def _relative(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / abs(b) if math.isfinite(a - b) and b else math.inf


if __name__ == "__main__":
    sys.exit(main())
