"""Time a mixture's layer from sorted rows to its output, and its grouped products alone.

    python scripts/bench_moe.py --cases deepseek_v2,qwen3
    python scripts/bench_moe.py --cases gpt_oss --implementations quack --direction fwd+bwd
    python scripts/bench_moe.py --cases tiny --out /tmp/tiny.jsonl

The layer runs by stages (`stages`, with each grouped product) and as one operation (`local_experts`), under
balanced loads and under skewed ones; the ratio is to the library's products at the same offsets (PERF-5).
What stands in a line is in `docs/benchmarks.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from src.bench.op_script import run
from src.bench.ops_moe import CASES


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and append; 1 if something failed, the code of a UserError, else 0."""
    return run("moe", __doc__ or "", CASES, argv)


if __name__ == "__main__":
    sys.exit(main())
