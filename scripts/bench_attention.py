"""Time every implementation of attention, against the fastest.

    python scripts/bench_attention.py --cases mla,gqa
    python scripts/bench_attention.py --implementations sdpa_cudnn --direction fwd
    python scripts/bench_attention.py --cases tiny --out /tmp/tiny.jsonl

Causal, without packing; half of the scores are counted, and 3.5 times the forward for both directions
(PERF-6).
What stands in a line is in `docs/benchmarks.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from src.bench.op_script import run
from src.bench.ops_attention import CASES


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and append; 1 if something failed, the code of a UserError, else 0."""
    return run("attention", __doc__ or "", CASES, argv)


if __name__ == "__main__":
    sys.exit(main())
