"""Where the time of the traced steps went: groups of operations, largest kernels, waits of the host.

    python train.py 'profile.steps=[20,22]' run_name=traced
    python scripts/profile_report.py runs/traced
    python scripts/profile_report.py runs/traced --rank 0 --json

A step that reads metrics, evaluates or saves waits for the device; in the others a wait or a copy to the host
is a fault, unless experts are spread over ranks. The trace opens in chrome://tracing and in Perfetto.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from src.bench.trace import read


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 2 without a trace."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--rank", type=int, default=0, help="whose trace")
    parser.add_argument("--kernels", type=int, default=15, help="how many of the largest kernels")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    arguments = parser.parse_args(argv)
    path = arguments.run / "profile" / f"rank_{arguments.rank:05d}.trace.json.gz"
    if not path.is_file():
        there = ", ".join(sorted(found.name for found in path.parent.glob("*.trace.json.gz"))) or "none"
        print(f"no {path}; traces there: {there}. profile.steps=[20,22] writes one", file=sys.stderr)
        return 2
    try:
        found = read(path)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    kernels = arguments.kernels
    print(json.dumps(found.json(kernels)) if arguments.json else "\n".join(found.lines(kernels)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
