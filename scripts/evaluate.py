"""Evaluate a checkpoint of a run on held-out documents, in one process, and print one JSON object.

    python scripts/evaluate.py run=runs/NAME
    python scripts/evaluate.py run=runs/NAME step=100 per_document=true
    python scripts/evaluate.py run=runs/NAME data=text_files 'data.files=["notes/**/*.md"]'

The run's own `config.yaml` says model, tokenizer and data; overrides of `data`, `evaluation.samples`,
`kernels`, `micro_batch_size`, `paths.data` and `platform` change how it is looked at. `per_document=true`
evaluates the whole held-out set and writes `RUN/documents.jsonl`, a line for each document.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from src.errors import UserError
from src.run_config import configs_of_run
from src.script import script_values


@dataclass
class Values:
    """What the script itself takes."""

    run: str | None = None
    """Directory of the run."""
    step: int | None = None
    """Step of the checkpoint; the newest complete one if left out."""
    per_document: bool = False
    """Evaluate every held-out document, and write the losses of its tokens to `RUN/documents.jsonl`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the evaluation; 2 for wrong words or no run, 4 for data, 8 where no checkpoint can be loaded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="run=RUN, step=N, per_document=true, and overrides")
    try:
        values, overrides = script_values(Values, parser.parse_args(argv).overrides)
        print(json.dumps(evaluate(values, overrides), allow_nan=False))
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code
    return 0


def evaluate(values: Values, overrides: Sequence[str]) -> dict[str, object]:
    """Check everything that is typed, then load and evaluate."""
    run = Path(values.run or "RUN")
    configs = configs_of_run(run, overrides, all_samples=values.per_document)
    from src.trainer.evaluate_run import evaluate_run

    return evaluate_run(run.resolve(), configs, values.step, values.per_document)


if __name__ == "__main__":
    raise SystemExit(main())
