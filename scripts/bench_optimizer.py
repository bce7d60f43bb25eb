"""Time the update, the gradient norm and sums over micro-batches as shares of the copy bandwidth.

    python scripts/bench_optimizer.py --cases deepseek_v2_layer
    python scripts/bench_optimizer.py --implementations triton --steps 20
    python scripts/bench_optimizer.py --cases tiny --out /tmp/tiny.jsonl

A case is a list of parameters. The update runs with fp32 masters, with masters in two halves, these with a
first moment in bf16, and with all states in the compute dtype; the sums as the first and as a later
micro-batch of a step. Bytes are counted by formula (PERF-8).
What stands in a line is in `docs/benchmarks.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from src.bench.op_script import Cases, run
from src.bench.ops_optimizer import SHAPES, subjects


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and append; 1 if something failed, the code of a UserError, else 0."""
    return run("optimizer", __doc__ or "", Cases(SHAPES, subjects), argv)


if __name__ == "__main__":
    sys.exit(main())
