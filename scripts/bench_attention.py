"""Time every implementation of attention, against the fastest.

    python scripts/bench_attention.py --cases mla,gqa
    python scripts/bench_attention.py --cases gqa_packed,gpt_oss --direction fwd
    python scripts/bench_attention.py --cases mla --implementations sdpa_cudnn --tokens 4096
    python scripts/bench_attention.py --cases tiny --out /tmp/tiny.jsonl

Causal; half of the square of each document is counted, less beyond a window, and 3.5 times the forward for
both directions (PERF-6). In packed cases a sample holds four documents.
What stands in a line is in `docs/benchmarks.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from src.bench.op_script import Cases, run
from src.bench.ops_attention import SHAPES, resized, subjects


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and append; 1 if something failed, the code of a UserError, else 0."""
    return run("attention", __doc__ or "", Cases(SHAPES, subjects, resized), argv)


if __name__ == "__main__":
    sys.exit(main())
