"""Time whole training steps, ours and a peer's in turn on one device, and append the results.

    python scripts/bench_model.py --cases deepseek_v2_lite_8l,qwen3_30b_8l --precision bf16,master
    python scripts/bench_model.py --cases deepseek_v2_lite_8l --tokens-per-step 65536 --profile
    python scripts/bench_model.py --cases tiny --blocks 2 --steps 2 --warmup 1

A case is a file of `conf/experiment/bench`. Each side is built and stepped by the training loop itself. In
bf16 states neither side clips unless `--peer-clip` is given; in other precisions ours always does. What is
measured and how stands in `docs/benchmarks.md`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from src.bench import record
from src.bench.clock import measure_ceilings
from src.bench.compare import collect
from src.bench.lines import table
from src.bench.model import Bench, Options, Result, compose_side, configs_of
from src.errors import UserError
from src.trainer.runtime import start

DEFAULT_CASES = "deepseek_v2_lite_8l,qwen3_30b_8l"
DEFAULT_OUT = Path("benchmarks/bench_model.jsonl")
PEERS = ("transformers", "none")
DTYPES_BY_DEVICE = {"cuda": ("bf16,master", "bf16"), "cpu": ("fp32", "fp32")}
"""Precisions of ours and of the peer where none are given."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every case; 1 if one failed, the code of a UserError, else 0."""
    arguments = parser().parse_intermixed_args(argv)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    ours, theirs = DTYPES_BY_DEVICE[kind]
    options = Options(
        precisions=tuple((arguments.precision or ours).split(",")),
        peer=None if arguments.peer == "none" else arguments.peer,
        peer_precision=arguments.peer_precision or theirs,
        peer_clips=arguments.peer_clip,
        peer_compiles=tuple(arguments.peer_compile.split(",")),
        tokens=arguments.tokens_per_step,
        blocks=arguments.blocks,
        steps=arguments.steps,
        warmup=arguments.warmup,
        profiles=arguments.profile,
        overrides=tuple(arguments.overrides),
    )
    try:
        return measure(arguments.cases.split(","), options, arguments.out)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--cases", default=DEFAULT_CASES, help="files of conf/experiment/bench, by commas")
    found.add_argument("--precision", help="of ours, several by commas; bf16,master on a GPU, else fp32")
    found.add_argument("--tokens-per-step", type=int, help="tokens of a step; the case's own if left out")
    found.add_argument("--peer", choices=PEERS, default=PEERS[0], help="the other side")
    found.add_argument("--peer-precision", help="bf16 on a GPU, else fp32")
    found.add_argument(
        "--peer-compile", default="auto", help="backend.compile of the peer, several by commas"
    )
    found.add_argument("--peer-clip", action="store_true", help="the peer clips, and ours in bf16 too")
    found.add_argument("--blocks", type=int, default=3, help="blocks a side")
    found.add_argument("--steps", type=int, default=10, help="timed steps of a block")
    found.add_argument("--warmup", type=int, default=10, help="steps of a side before anything is timed")
    found.add_argument("--profile", action="store_true", help="trace three steps of each side")
    found.add_argument("--out", type=Path, default=DEFAULT_OUT, help="file that results are appended to")
    found.add_argument("overrides", nargs="*", help="overrides for both sides, as for train.py")
    return found


def measure(cases: Sequence[str], options: Options, out: Path) -> int:
    """Compose everything, then the ceilings, then the cases; each comparison is written when it is done."""
    for case in cases:
        configs_of(case, options)
    widest = "master" if "master" in (*options.precisions, options.peer_precision) else options.precisions[0]
    runtime = start(compose_side(cases[0], "native", widest, True, options))
    # Several precisions compile the same code; beyond the limit torch would run it uncompiled without a word.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    ceilings = measure_ceilings(runtime.device)
    collect(runtime.device)
    say(f"ceilings: {ceilings.gemm_tflops:.1f} TFLOP/s of a product, {ceilings.copy_gbs:.0f} GB/s of a copy")
    results: list[Result] = []

    def keep(found: list[Result]) -> None:
        record.append(out, [result.line for result in found])
        results.extend(found)

    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(options, runtime, ceilings, Path(scratch), say)
        for case in cases:
            say(case)
            bench.case(case, keep)
    runtime.close()
    report(results, bench.failed)
    return 1 if bench.failed else 0


def report(results: Sequence[Result], failed: Sequence[str]) -> None:
    """The largest kernels of each side if they were traced, then the table."""
    for result in results:
        if result.profile is not None:
            case = result.line["case"]
            say(f"\n{case['model']} {record.side(result.line)} {case['precision']}")
            say("\n".join(result.profile.lines()))
            shares = (f"{group} {share:.1%}" for group, share in result.profile.share.items())
            say(f"  {'  '.join(shares)}")
    say("\n".join(["", *table([result.line for result in results]), *(f"failed: {what}" for what in failed)]))


def say(text: str) -> None:
    """A line at once, whatever stdout is."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
