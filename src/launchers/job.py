"""One job of a sweep, in a process of its own: `python -m src.launchers.job FOLDER`.

The folder holds the job's `config.yaml` and `overrides.yaml`, which the sweep composed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from src.compose import load_config
from src.launchers.launch import run_one
from src.launchers.ranks import WORKER
from src.report_facts import override_list
from src.trainer.worker import die_with_parent


def main() -> int:
    """Launch the job and return its exit code; killed with the sweep, it takes its ranks along (LOCAL-2)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="jobs of the sweep side by side")
    parser.add_argument("--seat", type=int, default=0, help="which of them this is")
    parser.add_argument("--worker", default=WORKER, help="module that a rank runs")
    arguments = parser.parse_args()
    die_with_parent()
    config = load_config(arguments.folder / "config.yaml")
    overrides = override_list(arguments.folder / "overrides.yaml")
    return run_one(config, overrides, arguments.worker, arguments.jobs, arguments.seat)


if __name__ == "__main__":
    raise SystemExit(main())
