"""Look at checkpoints and take them apart.

    python scripts/checkpoints.py list RUN
    python scripts/checkpoints.py verify CHECKPOINT
    python scripts/checkpoints.py flat CHECKPOINT OUT.safetensors

A checkpoint is a directory such as ``runs/NAME/checkpoints/step-00000100``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from src.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; 0, or 8 if a checkpoint is not complete (2 from argparse)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, (function, help_text, words) in VERBS.items():
        verb = verbs.add_parser(name, help=help_text)
        verb.set_defaults(function=function)
        for word in words:
            verb.add_argument(word, type=Path)
    arguments = vars(parser.parse_args(argv))
    function, _ = arguments.pop("function"), arguments.pop("verb")
    try:
        return int(function(**arguments))
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code


def list_run(run: Path) -> int:
    """One line per checkpoint, newest first."""
    from src.trainer.checkpoint.directory import IncompleteError, read_meta, steps

    for path in steps(run):
        try:
            meta, _ = read_meta(path)
            print(f"{path}  {len(meta.tensors)} tensors  {meta.size / 2**20:.1f} MiB  attempt {meta.attempt}")
        except IncompleteError as error:
            print(f"{path}  not complete: {error}")
    return 0


def verify(checkpoint: Path) -> int:
    """Compare every file with its sha256."""
    from src.trainer.checkpoint.flat import whole

    meta = whole(checkpoint)
    print(f"{checkpoint} is complete: step {meta.step}, {len(meta.files)} files, {meta.size / 2**20:.1f} MiB")
    return 0


def flat(checkpoint: Path, out: Path) -> int:
    """Write full tensors by their mesh-free names."""
    from src.trainer.checkpoint.flat import flatten

    meta = flatten(checkpoint, out)
    print(f"{out}: {len(meta.tensors)} tensors of step {meta.step}")
    return 0


VERBS = {
    "list": (list_run, "the checkpoints of a run directory", ("run",)),
    "verify": (verify, "whether every file of a checkpoint is as it was written", ("checkpoint",)),
    "flat": (flat, "all tensors into one .safetensors file", ("checkpoint", "out")),
}


if __name__ == "__main__":
    sys.exit(main())
