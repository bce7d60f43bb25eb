"""Time norms, rotations, activation, copies and sums of rows and routing, of the copy bandwidth.

    python scripts/bench_elementwise.py --cases deepseek_v2,qwen3,gpt_oss
    python scripts/bench_elementwise.py --implementations triton --direction fwd+bwd
    python scripts/bench_elementwise.py --cases tiny --out /tmp/tiny.jsonl

Bytes are inputs, outputs and gradients once each (PERF-9); `route_and_sort` is what PERF-10 bounds.
What stands in a line is in `docs/benchmarks.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from src.bench.op_script import run
from src.bench.ops_elementwise import CASES


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and append; 1 if something failed, the code of a UserError, else 0."""
    return run("elementwise", __doc__ or "", CASES, argv)


if __name__ == "__main__":
    sys.exit(main())
