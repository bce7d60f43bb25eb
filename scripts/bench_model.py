"""Time whole training steps, ours and a peer's in turn on one device, and append the results.

    python scripts/bench_model.py --cases deepseek_v2_lite_8l,qwen3_30b_8l --precision bf16,master
    python scripts/bench_model.py --cases gpt_oss_20b_6l --routing learned,even --tokens-per-step 16384,65536
    python scripts/bench_model.py --cases deepseek_v2_lite_8l --ours kernels.attention=sdpa_cudnn --profile
    python scripts/bench_model.py --cases dense_1b --precision split --ours precision.fp8=dense --peer plain
    python scripts/bench_model.py --cases tiny --blocks 2 --steps 2 --warmup 1

A case is a file of `conf/experiment/bench`. Each side is built and stepped by the training loop itself. In
bf16 states neither side clips unless `--peer-clip` is given; in other precisions ours always does. What the
file of results has already, of the same commit and versions, is skipped, so that a command that was cut off
goes on when it is typed again. What is measured and how stands in `docs/benchmarks.md`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from src.bench import record
from src.bench.cases import LEARNED, Group, Options, groups_of, split_overrides
from src.bench.clock import measure_ceilings
from src.bench.compare import collect
from src.bench.model import Bench, Result
from src.bench.table import table
from src.errors import UserError
from src.trainer.runtime import start

DEFAULT_CASES = "deepseek_v2_lite_8l,qwen3_30b_8l"
DEFAULT_OUT = Path("benchmarks/bench_model.jsonl")
PEERS = ("transformers", "eager", "plain", "none")
ROUTINGS = (LEARNED, "even", "uniform", "dirichlet")
DTYPES_BY_DEVICE = {"cuda": ("bf16,master", "bf16"), "cpu": ("fp32", "fp32")}
"""Precisions of ours and of the peer where none are given."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every case; 1 if one failed, the code of a UserError, else 0."""
    arguments = parser().parse_intermixed_args(argv)
    try:
        skipped: list[str] = []
        options = options_of(arguments)
        groups = groups_of(arguments.cases.split(","), options, skipped)
        say("".join(f"{text}\n" for text in skipped).rstrip() or "every case is composed")
        return measure(groups, options, arguments.out, arguments.again)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code


def options_of(arguments: argparse.Namespace) -> Options:
    """What the command line asks for."""
    ours, theirs = DTYPES_BY_DEVICE["cuda" if torch.cuda.is_available() else "cpu"]
    unknown = sorted({*(arguments.routing or ())} - {*ROUTINGS})
    if unknown:
        raise UserError(f"--routing {','.join(unknown)}: what exists is {', '.join(ROUTINGS)}")
    return Options(
        precisions=tuple((arguments.precision or ours).split(",")),
        peer=None if arguments.peer == "none" else arguments.peer,
        peer_precision=arguments.peer_precision or theirs,
        peer_clips=arguments.peer_clip,
        peer_compiles=tuple(arguments.peer_compile.split(",")),
        routings=tuple(arguments.routing or (None,)),
        tokens=tuple(arguments.tokens_per_step or (None,)),
        blocks=arguments.blocks,
        steps=arguments.steps,
        warmup=arguments.warmup,
        profiles=arguments.profile,
        ours=tuple(override for text in arguments.ours for override in split_overrides(text)),
        overrides=tuple(arguments.overrides),
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--cases", default=DEFAULT_CASES, help="files of conf/experiment/bench, by commas")
    found.add_argument("--precision", help="of ours, several by commas; bf16,master on a GPU, else fp32")
    found.add_argument("--routing", type=words, help=f"of {', '.join(ROUTINGS)}, several by commas")
    found.add_argument(
        "--tokens-per-step", type=numbers, help="several by commas; the case's own if left out"
    )
    found.add_argument(
        "--peer", choices=PEERS, default=PEERS[0], help="the other side; eager and plain are ours"
    )
    found.add_argument("--peer-precision", help="bf16 on a GPU, else fp32")
    found.add_argument(
        "--peer-compile", default="auto", help="backend.compile of the peer, several by commas"
    )
    found.add_argument("--peer-clip", action="store_true", help="the peer clips, and ours in bf16 too")
    found.add_argument(
        "--ours", action="append", default=[], metavar="OVERRIDES", help="for our side alone, by commas"
    )
    found.add_argument("--blocks", type=int, default=3, help="blocks a side")
    found.add_argument("--steps", type=int, default=10, help="timed steps of a block")
    found.add_argument("--warmup", type=int, default=10, help="steps of a side before anything is timed")
    found.add_argument("--profile", action="store_true", help="trace three steps of each side")
    found.add_argument("--again", action="store_true", help="measure what the file of results has already")
    found.add_argument("--out", type=Path, default=DEFAULT_OUT, help="file that results are appended to")
    found.add_argument("overrides", nargs="*", help="overrides for both sides, as for train.py")
    return found


def words(text: str) -> list[str]:
    """Names by commas."""
    return text.split(",")


def numbers(text: str) -> list[int]:
    """Numbers by commas; `ValueError` for another text."""
    return [int(part) for part in text.split(",")]


def measure(groups: Sequence[Group], options: Options, out: Path, again: bool) -> int:
    """The ceilings, then each comparison that the file of results lacks; each is written when it is done."""
    known = [] if again else record.read_current(out)
    configs = [config for group in groups for config in group.ours]
    masters = [config for config in configs if config.precision.name == "master"]
    runtime = start((masters or configs)[0])
    # Several precisions compile the same code; beyond the limit torch would run it uncompiled without a word.
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    ceilings = measure_ceilings(runtime.device)
    collect(runtime.device)
    say(f"ceilings: {ceilings.gemm_tflops:.1f} TFLOP/s of a product, {ceilings.copy_gbs:.0f} GB/s of a copy")
    results: list[Result] = []

    def keep(found: list[Result]) -> None:
        record.append(out, [result.line for result in found])
        results.extend(found)

    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(options, runtime, ceilings, Path(scratch), known, keep, say)
        for group in groups:
            bench.group(group)
    runtime.close()
    report(results, bench.failed)
    return 1 if bench.failed else 0


def report(results: Sequence[Result], failed: Sequence[str]) -> None:
    """The largest kernels of each side if they were traced, then the table."""
    for result in results:
        if result.profile is not None:
            case = result.line["case"]
            say(f"\n{case['model']} {result.line['engine']} {case['precision']}")
            say("\n".join(result.profile.lines()))
            shares = (f"{group} {share:.1%}" for group, share in result.profile.share.items())
            say(f"  {'  '.join(shares)}")
    lines = table([result.line for result in results]) if results else ["nothing was measured"]
    say("\n".join(["", *lines, *(f"failed: {what}" for what in failed)]))


def say(text: str) -> None:
    """A line at once, whatever stdout is."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
