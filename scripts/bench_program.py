"""Time training steps of one model under `pipeline.program=plain`, `staged`, and recomputation, in turn.

    python scripts/bench_program.py blocks=5 steps=5 model=deepseek_v2 max_steps=1000

What is not `blocks`, `steps` or `warmup` is an override for all of them, as for train.py. Prints for each the
median milliseconds a step, the ratio to plain in this process, the loss of the last step, which is the same
for all, and on a GPU the peak of allocated memory. How far plain lies from itself stands at the end.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from src.bench.clock import spread
from src.bench.side import Side, opened
from src.compose import compose
from src.errors import UserError
from src.script import script_values
from src.trainer.data.prepare import prepare
from src.trainer.runtime import start

FORMS = {
    "plain": ["pipeline.program=plain"],
    "staged": ["pipeline.program=staged"],
    "stage": ["recompute=stage"],
    "full": ["recompute=full"],
}
"""Name → overrides."""


@dataclass
class Values:
    """How much is measured."""

    blocks: int = 5
    """Blocks of each form, in turn."""
    steps: int = 5
    """Timed steps of a block."""
    warmup: int = 2
    """Steps of each before anything is timed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the code of a UserError, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="blocks=N, steps=N, warmup=N, and overrides")
    try:
        values, words = script_values(Values, parser.parse_args(argv).overrides)
        configs = {name: compose([*words, *more]).config for name, more in FORMS.items()}
        first = next(iter(configs.values()))
        if first.mesh.world != 1:
            raise UserError(f"mesh of {first.mesh.world} ranks: this times one process, mesh=single")
        prepare(first, print)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code
    runtime = start(first)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as open_sides:
        sides = [
            open_sides.enter_context(opened(config, runtime, Path(scratch) / name, name))
            for name, config in configs.items()
        ]
        measure(sides, values)
        report(sides)
    return 0


def measure(sides: Sequence[Side], values: Values) -> None:
    """Blocks in turn; the same steps of the same run for each."""
    for side in sides:
        side.warm(values.warmup)
    for _ in range(values.blocks):
        for side in sides:
            side.block(values.steps)


def report(sides: Sequence[Side]) -> None:
    """A line a form."""
    plain = sides[0]
    for side in sides:
        ratios = [a / b for a, b in zip(side.medians, plain.medians, strict=True)]
        ratio = sorted(ratios)[len(ratios) // 2]
        peak = f"  peak {side.peak['allocated'] / 2**30:.2f} GiB" if side.peak else ""
        times = f"{side.median:9.2f} ms a step  {ratio:.3f} of plain"
        print(f"{side.name:<8} {times}  loss {side.loss(-1):.6f}{peak}")
    versions = f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    print(f"plain against itself: {spread(plain.medians):.1%} between blocks; {versions}")


if __name__ == "__main__":
    sys.exit(main())
