"""Measure how long a sweep takes before its first job starts, by phase.

    python scripts/bench_sweep.py jobs=100
    python scripts/bench_sweep.py jobs=100 meshes=19 optimizer=sgd

Seeds times meshes make the jobs. Composition includes validation; the last line is the whole command, a dry
run in a fresh process, whose seeds are rounded up. Nothing is trained or written.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TypeVar

from src.code_identity import CHECKOUT, code_record
from src.compose import check_overrides, compose_jobs, config_loader
from src.errors import UserError
from src.launchers.jobs import make_jobs
from src.launchers.sweep import plan_jobs
from src.script import script_values

Result = TypeVar("Result")

MESHES = [
    *(
        "single",
        "ep2",
        "ep4",
        "dp4",
        "pp2",
        "pp2ep2",
        "pp2ep4",
        "pp2dp4",
        "pp4",
        "pp4ep2",
        "pp4ep4",
        "pp4dp4",
    ),
    *("rep2", "rep2ep2", "rep2ep4", "rep2dp4", "dp2", "dp2ep2", "dp2ep4"),
]
"""Specs that the default model and batch can have."""


@dataclass
class Values:
    """What the script itself takes."""

    jobs: int = 100
    """Jobs of the sweep."""
    meshes: int = 2
    """Different meshes among them, of those in MESHES."""


def main() -> int:
    """Print seconds by phase; 2 where the overrides are refused."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="jobs=N, meshes=N, and overrides as for train.py")
    try:
        values, common = script_values(Values, parser.parse_args().overrides)
        meshes = MESHES[: max(1, values.meshes)]
        seeds = range(-(-values.jobs // len(meshes)))
        pairs = list(product(seeds, meshes))[: values.jobs]
        jobs = [[*common, f"seed={seed}", f"mesh={mesh}"] for seed, mesh in pairs]
        measure([*common, f"seed=range(0,{len(seeds)})", f"mesh={','.join(meshes)}"], jobs)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code
    return 0


def measure(typed: list[str], jobs: list[list[str]]) -> None:
    """Each phase once, in the order of a sweep."""
    print(f"{len(jobs)} jobs, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores: {' '.join(typed)}")
    timed("check the command line", lambda: check_overrides(typed, multirun=True))
    with config_loader() as loader:
        configs = timed("compose and validate", lambda: compose_jobs(loader, jobs))
    named = timed("name", lambda: make_jobs(configs, jobs, typed))
    timed("plan", lambda: plan_jobs(named))
    timed("hash the code", code_record)
    command = [sys.executable, str(Path(CHECKOUT) / "train.py"), "-m", "dry_run=true", *typed]
    timed("the whole command", lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True))


def timed(name: str, phase: Callable[[], Result]) -> Result:
    """The result of a phase, and its seconds on a line."""
    started = time.monotonic()
    result = phase()
    print(f"{name:<23} {time.monotonic() - started:7.2f} s")
    return result


if __name__ == "__main__":
    raise SystemExit(main())
