"""Build the data of a run, or check what is there.

    python scripts/prepare_data.py build data=stdlib tokenizer.vocab_size=8192
    python scripts/prepare_data.py build --verify data=stdlib

`build` makes what is missing in the store under the same key as `train.py` with the same overrides; with
`--verify` it then reads every file whole and compares its hash. It prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from src.compose import compose
from src.config import Config
from src.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; 0, or the code of a UserError: 2 for overrides, 4 for data (2 from argparse)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    build_verb = verbs.add_parser("build", help="make what is missing")
    build_verb.add_argument("--verify", action="store_true", help="read every file and compare its hash")
    build_verb.add_argument("overrides", nargs="*", help="overrides as for train.py")
    arguments = parser.parse_args(argv)
    try:
        print(json.dumps(build(compose(arguments.overrides).config, arguments.verify)))
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code
    return 0


def build(config: Config, verify: bool) -> dict[str, Any]:
    """Prepare; the key, where its files are, whether they were built now, and whether they were verified."""
    from src.trainer.data.prepare import prepare, verify_data

    prepared = prepare(config, lambda line: print(line, file=sys.stderr))
    verified = verify_data(config, prepared) if verify else []
    return {
        "key": prepared.key,
        "path": None if prepared.path is None else str(prepared.path),
        "built": prepared.built,
        "verified": verified,
    }


if __name__ == "__main__":
    sys.exit(main())
