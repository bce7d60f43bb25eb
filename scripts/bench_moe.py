"""Time a mixture's layer from its router to its output, over its grouped products alone, and its parts.

    python scripts/bench_moe.py --cases deepseek_v2,qwen3
    python scripts/bench_moe.py --cases gpt_oss --implementations quack,auto --direction fwd+bwd
    python scripts/bench_moe.py --cases tiny --tokens 64 --out /tmp/tiny.jsonl

The layer is the model's own: router, order, rows, experts, combination, compiled on a GPU as in training. It
runs as `kernels=auto` has it, and with one other implementation of the fused experts or of their products at
a time, under balanced loads and under skewed ones; the ratio is to the library's products at the same offsets
(PERF-5). Each part follows by itself, under skewed loads.
What stands in a line is in `docs/benchmarks.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from src.bench.op_script import Cases, run
from src.bench.op_shapes import SHAPES
from src.bench.ops_moe import resized, subjects


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and append; 1 if something failed, the code of a UserError, else 0."""
    return run("moe", __doc__ or "", Cases(SHAPES, subjects, resized), argv)


if __name__ == "__main__":
    sys.exit(main())
