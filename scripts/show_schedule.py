"""Show what a pipeline schedule does: when each rank computes what, how long it waits, how much it keeps.

    python scripts/show_schedule.py pipeline=dualpipev mesh=pp4 script.micro_batches=16 script.out=out.svg

The table is the one that a run executes. A forward of one stage takes 1, a backward 2; sends take no time.
Without `script.micro_batches` it takes those of the config; without `script.out` it draws nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from src.compose import config_loader, typed
from src.composer import Composer
from src.config import Config
from src.errors import Problem, UserError
from src.script import script_values
from src.trainer.parallel import layout, rules
from src.trainer.parallel.pipeline.picture import FORMATS, draw
from src.trainer.parallel.pipeline.timeline import Timeline, simulate
from src.tree import raise_all


@dataclass
class Values:
    """What the script itself takes."""

    micro_batches: int | None = None
    """Micro-batches of a step."""
    out: str | None = None
    """File of the picture: .svg, .png or .pdf."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the numbers and write the picture; 2 where the schedule cannot run so."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="script.NAME=…, and overrides as for train.py")
    try:
        values, rest = script_values(Values, parser.parse_args(argv).overrides)
        with config_loader() as loader:
            config = typed(Composer(loader).compose(rest).config)
        count = layout.micro_batches(config) if values.micro_batches is None else values.micro_batches
        raise_all([*check(config, count), *check_out(values.out)])
        show(config, count, values.out)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code
    return 0


def check(config: Config, count: int) -> Iterator[Problem]:
    """What keeps the schedule from running `count` micro-batches; the model and the batch do not matter."""
    key, pp = "script.micro_batches", config.mesh.pp
    if pp < 2:
        yield Problem("mesh", f"pp={pp} is no pipeline", "mesh=pp4", rule="stages")
        return
    yield from rules.stages(config)
    if count < 1:
        yield Problem(key, f"{count} is not at least 1", f"{key}=8", rule="positive")
        return
    fault = rules.micro_batch_fault(config.pipeline.schedule, pp, count)
    if fault is not None:
        message, fit = fault
        yield Problem(key, message, " or ".join(f"{key}={n}" for n in fit), rule="micro-batches")


def check_out(out: str | None) -> Iterator[Problem]:
    """Whether a picture can be written there."""
    if out is None:
        return
    path = Path(out)
    if path.suffix not in FORMATS:
        names = ", ".join(f"{path.stem or 'schedule'}{ending}" for ending in FORMATS)
        yield Problem(
            "script.out", f"{out} does not end in {', '.join(FORMATS)}", f"one of {names}", "CFG-20"
        )
    if not path.parent.is_dir():
        yield Problem(
            "script.out", f"there is no directory {path.parent}", f"mkdir -p {path.parent}", "CFG-20"
        )


def show(config: Config, count: int, out: str | None) -> None:
    """The numbers on standard output, and the picture."""
    from src.trainer.parallel.pipeline.tables import make_table

    schedule, pp, per_rank = config.pipeline.schedule, config.mesh.pp, layout.stages_per_rank(config)
    timeline = simulate(make_table(schedule, pp, per_rank, count))
    title = f"{schedule}: {pp} ranks x {per_rank} stages, {count} micro-batches; {summary(timeline)}"
    print(title)
    print("rank  stages      idle  peak live activations")
    for rank in timeline.ranks:
        stages = " ".join(map(str, layout.stages_of(config, rank)))
        print(f"{rank:<4}  {stages:<10} {timeline.idle(rank):5.1%}  {timeline.peak_live(rank)}")
    if out is not None:
        draw(timeline, title, Path(out))
        print(out)


def summary(timeline: Timeline) -> str:
    """Makespan and idle share of all ranks."""
    idle = sum(timeline.idle(rank) for rank in timeline.ranks) / len(timeline.ranks)
    return f"makespan {timeline.makespan} forwards, {idle:.1%} idle"


if __name__ == "__main__":
    sys.exit(main())
