"""Time head and loss over the three products that they cannot do without.

    python scripts/bench_head.py --cases deepseek_v2,qwen3
    python scripts/bench_head.py --implementations triton --direction fwd+bwd --tokens 65536
    python scripts/bench_head.py --cases tiny --out /tmp/tiny.jsonl

The ratio is to bare products of whole matrices; memory is what a call takes beyond its inputs and the
gradients that it returns (PERF-7).
What stands in a line is in `docs/benchmarks.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from src.bench.op_script import Cases, run
from src.bench.ops_head import SHAPES, resized, subjects


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and append; 1 if something failed, the code of a UserError, else 0."""
    return run("head", __doc__ or "", Cases(SHAPES, subjects, resized), argv)


if __name__ == "__main__":
    sys.exit(main())
