"""What this machine, or every node of an allocation, can do, and what is wrong with it.

    python scripts/doctor.py
    python scripts/doctor.py --json platform=cuda platform.thresholds.disk=200GiB
    salloc -N 4 python scripts/doctor.py --nodes

Overrides are those of a run: its paths are looked at, and `platform.thresholds` says what is enough. With
`--nodes` the nodes that pass and those that do not are written to `passing_nodes.txt` and
`failing_nodes.txt`, for `--nodelist`, `--exclude` and `launcher.exclude=@failing_nodes.txt`. Ends with 3
where something is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from src.compose import compose
from src.errors import UserError
from src.launchers.allocation import check_nodes, write_lists
from src.launchers.checks import check_node


def main(argv: Sequence[str] | None = None) -> int:
    """Look, print, and return 0 or 3; 2 for wrong overrides."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="as for train.py")
    parser.add_argument("--nodes", action="store_true", help="every node of the job around, by srun")
    parser.add_argument("--json", action="store_true", help="print one JSON object a node, a line each")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the lists of nodes")
    arguments = parser.parse_args(argv)
    try:
        config = compose(arguments.overrides).config
        reports = check_nodes(config, arguments.overrides) if arguments.nodes else [check_node(config)]
        if arguments.nodes:
            write_lists(reports, arguments.out)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code
    for report in reports:
        print(json.dumps(report.json()) if arguments.json else report.text(), flush=True)
    return 0 if all(report.passed for report in reports) else 3


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # A check that hangs in the kernel has a thread which no exit waits for.
    os._exit(code)
