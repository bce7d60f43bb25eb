"""Rank meshes by what they would cost, on a machine without GPUs: what fits, bytes of a rank, idle time.

    python scripts/estimate.py model=deepseek_v2/lite platform=cuda launcher.gpu_memory=140GiB -m mesh=ep8,dp8
    python scripts/estimate.py model=qwen3_moe/30b_a3b platform=cuda mesh=ep8 imbalance=1.5

States are exact, activations an estimate (`docs/memory.md`). Idle time is that of the table that a run
executes, a forward of one stage taking 1 and a backward 2. `imbalance` is the rows of the fullest rank's
experts over those of an even routing. A mesh that the model or the batch refuses is named with the reason.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from src.compose import check_overrides, compose
from src.config import Config
from src.errors import UserError
from src.launchers.memory import Estimate, RankMemory
from src.launchers.plan import Memory, bytes_text, memory_of
from src.machine import find_machine
from src.script import script_values
from src.trainer.parallel import layout
from src.trainer.parallel.pipeline.timeline import simulate


@dataclass
class Values:
    """What the script itself takes."""

    imbalance: float = 1.0
    """Rows of the fullest rank's experts over those of an even routing; matters with ep above 1."""


@dataclass(frozen=True)
class Row:
    """One mesh, or why there is none."""

    words: str
    world: int = 0
    memory: Memory | None = None
    largest: RankMemory | None = None
    bubble: float = 0.0
    """Share of the step in which ranks of the pipeline wait, in the mean."""
    refused: str = ""

    @property
    def order(self) -> tuple[int, float, int]:
        """What fits comes first, then what idles least, then what needs least of a rank."""
        if self.memory is None or self.largest is None:
            return 3, 0.0, 0
        return {True: 0, None: 1, False: 2}[self.memory.fits], self.bubble, self.largest.total


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 2 where the overrides are wrong or nothing is left, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--multirun", action="store_true", help="values by commas are tried in turn")
    parser.add_argument("overrides", nargs="*", help="imbalance=N, and overrides as for train.py")
    arguments = parser.parse_intermixed_args(argv)
    try:
        values, rest = script_values(Values, arguments.overrides)
        check_overrides(rest, multirun=arguments.multirun)
        rows = sorted(rows_of(rest, values.imbalance), key=lambda row: row.order)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code
    print("\n".join(table(rows)))
    return 2 if all(row.refused for row in rows) else 0


def rows_of(overrides: Sequence[str], imbalance: float) -> Iterator[Row]:
    """A row for each job, as Hydra's sweeper splits them."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    (batch,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    shared = set.intersection(*map(set, batch))
    for job in batch:
        words = " ".join(word for word in job if word not in shared) or "as given"
        try:
            config = compose(job).config
        except UserError as error:
            yield Row(words, refused="; ".join(f"{p.key}: {p.message}" for p in error.problems))
        else:
            yield estimated(words, config, imbalance)


def estimated(words: str, config: Config, imbalance: float) -> Row:
    """What the config would take on the machine that it describes."""
    machine = find_machine(config)
    estimate = Estimate(config, machine.platform, imbalance=imbalance)
    held = Counter(estimate.of(rank) for rank in range(config.mesh.world))
    largest = max(held, key=lambda rank: rank.total)
    return Row(words, config.mesh.world, memory_of(held, machine), largest, bubble_of(config))


def bubble_of(config: Config) -> float:
    """Idle share of the executed table; 0 without stages."""
    if config.mesh.pp == 1:
        return 0.0
    from src.trainer.parallel.pipeline.tables import make_table

    per_rank, count = layout.stages_per_rank(config), layout.micro_batches(config)
    timeline = simulate(make_table(config.pipeline.schedule, config.mesh.pp, per_rank, count))
    return sum(timeline.idle(rank) for rank in timeline.ranks) / len(timeline.ranks)


HEAD = ("overrides", "ranks", "fits", "largest rank", "states", "activations", "idle")


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Columns of text, then the arithmetic of the first row and what was refused."""
    cells = [HEAD, *(cells_of(row) for row in rows if not row.refused)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEAD))]
    for row in cells:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
    if rows and rows[0].memory is not None:
        yield f"{rows[0].words}: {rows[0].memory.arithmetic}"
    yield from (f"refused: {row.words}: {row.refused}" for row in rows if row.refused)


def cells_of(row: Row) -> tuple[str, ...]:
    """The texts of a row."""
    assert row.memory is not None
    assert row.largest is not None
    fits = {True: "yes", False: "no", None: "unknown"}[row.memory.fits]
    states = row.largest.total - row.largest.activations
    sizes = (row.largest.total, states, row.largest.activations)
    return row.words, str(row.world), fits, *map(bytes_text, sizes), f"{row.bubble:.1%}"


if __name__ == "__main__":
    sys.exit(main())
