"""Time norms, rotations, activation, copies and sums of rows, routing and loss, of the copy bandwidth.

    python scripts/bench_elementwise.py --cases deepseek_v2,qwen3,gpt_oss
    python scripts/bench_elementwise.py --implementations triton --direction fwd+bwd
    python scripts/bench_elementwise.py --cases tiny --tokens 64 --out /tmp/tiny.jsonl

Bytes are inputs, outputs and gradients once each (PERF-9); `route_and_sort` is what PERF-10 bounds. On a GPU
what is plain torch is compiled, as training compiles the layers that it is in.
What stands in a line is in `docs/benchmarks.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from src.bench.op_script import Cases, run
from src.bench.ops_elementwise import SHAPES, resized, subjects


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and append; 1 if something failed, the code of a UserError, else 0."""
    return run("elementwise", __doc__ or "", Cases(SHAPES, subjects, resized), argv)


if __name__ == "__main__":
    sys.exit(main())
