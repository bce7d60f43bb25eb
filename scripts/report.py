"""Write `report.md`, `report.json` and `loss.png` of a run, or of all runs below a directory, again."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from src.errors import UserError
from src.report import write_report


def main() -> int:
    """Print the path of the report; exit 2 where there is no run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="a run directory, or a sweep's")
    parser.add_argument("--no-figure", action="store_true", help="leave loss.png as it is")
    arguments = parser.parse_args()
    try:
        print(write_report(arguments.directory.resolve(), figure=not arguments.no_figure))
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
