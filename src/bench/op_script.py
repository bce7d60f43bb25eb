"""The command line of the scripts that time one operation each, and what they print and keep."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from src.bench import record
from src.bench.clock import measure_ceilings
from src.bench.op import DIRECTIONS, Stopwatch, Subject, collect, measure
from src.bench.op_record import FIELDS, Setting, line_of, table
from src.bench.place import Place, place
from src.errors import UserError

TINY = "tiny"
"""Name of the case that a CPU can measure in a second."""

Cases = Mapping[str, Callable[[Place], Sequence[Subject]]]
"""Name of a case → its subjects there."""


def run(name: str, about: str, cases: Cases, argv: Sequence[str] | None) -> int:
    """Measure what the command line asks for; 1 if a side failed, the code of a UserError, else 0."""
    arguments = parser(name, about, cases).parse_args(argv)
    try:
        where = place()
        default = [case for case in cases if case != TINY] if where.device.type == "cuda" else [TINY]
        asked = arguments.cases.split(",") if arguments.cases else default
        chosen = arguments.implementations.split(",") if arguments.implementations else None
        _check(asked, cases, arguments.steps)
        directions = [arguments.direction] if arguments.direction else DIRECTIONS
        return _measure([cases[case] for case in asked], where, chosen, directions, arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code


def parser(name: str, about: str, cases: Cases) -> argparse.ArgumentParser:
    """The options that all of them have."""
    raw = argparse.RawDescriptionHelpFormatter
    found = argparse.ArgumentParser(prog=f"bench_{name}.py", description=about, formatter_class=raw)
    found.add_argument("--cases", help=f"by commas: {', '.join(cases)}; on a GPU all but {TINY}, else {TINY}")
    found.add_argument(
        "--implementations", help="names by commas; what they are compared with is timed besides"
    )
    found.add_argument("--direction", choices=DIRECTIONS, help="both if left out")
    found.add_argument("--steps", type=int, default=10, help="timed calls of a block, of three a side")
    out = Path(f"benchmarks/bench_{name}.jsonl")
    found.add_argument("--out", type=Path, default=out, help="file that results are appended to")
    return found


def _check(asked: Sequence[str], cases: Cases, steps: int) -> None:
    unknown = sorted({*asked} - {*cases})
    if unknown:
        raise UserError(f"--cases {','.join(unknown)}: what exists is {', '.join(cases)}")
    if steps < 1:
        raise UserError(f"--steps {steps}: a block has one call at least")


def _measure(
    makers: Sequence[Callable[[Place], Sequence[Subject]]],
    where: Place,
    chosen: Sequence[str] | None,
    directions: Sequence[str],
    arguments: argparse.Namespace,
) -> int:
    subjects = list(_narrowed([subject for make in makers for subject in make(where)], chosen))
    ceilings = measure_ceilings(where.device)
    collect(where.device)
    rates = f"{ceilings.gemm_tflops:.1f} TFLOP/s of a product, {ceilings.copy_gbs:.0f} GB/s of a copy"
    print(f"ceilings: {rates}", flush=True)
    watch = Stopwatch(where.device)
    setting = Setting.of(where, ceilings)
    lines, failed = [], []
    for subject in subjects:
        for direction in (direction for direction in directions if subject.of(direction)):
            sides = ", ".join("=".join(side.key) for side in subject.of(direction))
            print(f"{subject.case} {direction}: {sides}", flush=True)
            try:
                timings = measure(subject, direction, arguments.steps, where, watch)
            except Exception as error:  # The next subject may still run.
                failed.append(f"{subject.case} {direction}: {type(error).__name__}: {error}".splitlines()[0])
                collect(where.device)
                continue
            card = setting.card()
            found = [line_of(timing, setting, card) for timing in timings]
            record.append(arguments.out, found, FIELDS)
            lines += found
            collect(where.device)
    missing = {key: why for subject in subjects for key, why in subject.missing.items()}
    notes = [f"not here: {operation}={name} {why}" for (operation, name), why in missing.items()]
    print("\n".join(["", *table(lines), *notes, *(f"failed: {what}" for what in failed)]), flush=True)
    return 1 if failed else 0


def _narrowed(subjects: Sequence[Subject], chosen: Sequence[str] | None) -> Iterator[Subject]:
    """Only the sides of `chosen` implementations and what they are compared with, if any is named.

    Raises:
        UserError: nothing has such a name, or nothing that can run here.
    """
    if chosen is None:
        yield from subjects
        return
    there = {side.key[1] for subject in subjects for side in subject.sides}
    absent = {name: why for subject in subjects for (_, name), why in subject.missing.items()}
    for name in chosen:
        if name not in there:
            why = absent.get(name, f"is no implementation here: {', '.join(sorted(there))}")
            raise UserError(f"--implementations {name}: {name} {why}")
    for subject in subjects:
        sides = [side for side in subject.sides if side.key[1] in chosen]
        if sides:
            others = [s for s in subject.sides if s.key == subject.other and s not in sides]
            yield replace(subject, sides=[*sides, *others])
