"""The command line of the scripts that time one operation each, and what they print and keep."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from src.bench import record
from src.bench.clock import measure_ceilings
from src.bench.op import DIRECTIONS, Side, Subject, Timing, collect, measure
from src.bench.op_record import FIELDS, Setting, line_of, table
from src.bench.place import Place, place
from src.bench.stopwatch import Stopwatch
from src.errors import UserError

TINY = "tiny"
"""How the names of cases begin that a CPU can measure in a second."""
FORMS = 256
"""Forms in which a function may be compiled; beyond them torch would run it uncompiled without a word."""


@dataclass(frozen=True)
class Cases:
    """What a script can measure."""

    shapes: Mapping[str, Any]
    """Name of a case → its sizes."""
    subjects: Callable[[str, Any, Place], Sequence[Subject]]
    """Of a case and its sizes."""
    resized: Callable[[Any, int], Any] | None = None
    """The same sizes with so many tokens; None where there are no tokens."""

    def of(self, names: Sequence[str], tokens: int | None, where: Place) -> list[Subject]:
        """The subjects of these cases.

        Raises:
            UserError: a case with so many tokens is none.
        """
        found: list[Subject] = []
        for name in names:
            shape = self.shapes[name]
            if tokens is not None and self.resized is not None:
                shape = self.resized(shape, tokens)
            found += self.subjects(name, shape, where)
        return found


def run(name: str, about: str, cases: Cases, argv: Sequence[str] | None) -> int:
    """Measure what the command line asks for; 1 if a side failed, the code of a UserError, else 0."""
    arguments = parser(name, about, cases).parse_args(argv)
    try:
        where = place()
        is_tiny = where.device.type != "cuda"
        default = [case for case in cases.shapes if case.startswith(TINY) == is_tiny]
        asked = arguments.cases.split(",") if arguments.cases else default
        tokens = getattr(arguments, "tokens", None)
        _check(asked, cases, arguments.steps, tokens)
        subjects = cases.of(asked, tokens, where)
        if arguments.implementations:
            subjects = list(narrowed(subjects, arguments.implementations.split(",")))
        directions = [arguments.direction] if arguments.direction else DIRECTIONS
        with torch._dynamo.config.patch(recompile_limit=FORMS, fail_on_recompile_limit_hit=True):
            return Session(where, arguments.steps, arguments.out).measure(subjects, directions)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code


def parser(name: str, about: str, cases: Cases) -> argparse.ArgumentParser:
    """The options that all of them have."""
    raw = argparse.RawDescriptionHelpFormatter
    found = argparse.ArgumentParser(prog=f"bench_{name}.py", description=about, formatter_class=raw)
    names = ", ".join(cases.shapes)
    found.add_argument("--cases", help=f"by commas: {names}; if left out on a GPU all, else the tiny ones")
    found.add_argument(
        "--implementations", help="names by commas; what they are compared with is timed besides"
    )
    found.add_argument("--direction", choices=DIRECTIONS, help="both if left out")
    found.add_argument("--steps", type=int, default=10, help="timed calls of a block, of three a side")
    if cases.resized is not None:
        found.add_argument("--tokens", type=int, help="of a call; those of the case if left out")
    out = Path(f"benchmarks/bench_{name}.jsonl")
    found.add_argument("--out", type=Path, default=out, help="file that results are appended to")
    return found


def _check(asked: Sequence[str], cases: Cases, steps: int, tokens: int | None) -> None:
    wrong = []
    unknown = sorted({*asked} - {*cases.shapes})
    if unknown:
        wrong.append(f"--cases {','.join(unknown)}: what exists is {', '.join(cases.shapes)}")
    if steps < 1:
        wrong.append(f"--steps {steps}: a block has one call at least")
    if tokens is not None and tokens < 1:
        wrong.append(f"--tokens {tokens}: a call has one token at least")
    if wrong:
        raise UserError("\n".join(wrong))


def narrowed(subjects: Sequence[Subject], chosen: Sequence[str]) -> Iterator[Subject]:
    """Only the sides of `chosen` implementations and what they are compared with.

    Raises:
        UserError: nothing has such a name, or nothing that can run here.
    """
    there = {name for subject in subjects for side in subject.sides for name in _names(side)}
    absent = {name: why for subject in subjects for (_, name), why in subject.missing.items()}
    for name in chosen:
        if name not in there:
            why = absent.get(name, f"is no implementation here: {', '.join(sorted(there))}")
            raise UserError(f"--implementations {name}: {name} {why}")
    for subject in subjects:
        sides = [side for side in subject.sides if not _names(side).isdisjoint(chosen)]
        if sides:
            others = [s for s in subject.sides if s.key == subject.other and s not in sides]
            yield replace(subject, sides=[*sides, *others])


def _names(side: Side) -> set[str]:
    """An implementation's, and of one that varies an operation of a layer that operation's."""
    return {side.key[1], side.key[1].rpartition("=")[2], *(["auto"] if side.is_auto else [])}


class Session:
    """One run of a script: ceilings first, then subject by subject, each kept when it is done."""

    def __init__(self, where: Place, steps: int, out: Path) -> None:
        self._where, self._steps, self._out = where, steps, out
        self._lines: list[dict[str, Any]] = []
        self._failed: list[str] = []
        ceilings = measure_ceilings(where.device)
        collect(where.device)
        rates = f"{ceilings.gemm_tflops:.1f} TFLOP/s of a product, {ceilings.copy_gbs:.0f} GB/s of a copy"
        print(f"ceilings: {rates}", flush=True)
        self._setting, self._watch = Setting.of(where, ceilings), Stopwatch(where.device)

    def measure(self, subjects: Sequence[Subject], directions: Sequence[str]) -> int:
        """Time all of them, then print the table, what is not here and what failed; 1 if something did."""
        for subject in subjects:
            for direction in (direction for direction in directions if subject.of(direction)):
                sides = ", ".join("=".join(side.key) for side in subject.of(direction))
                print(f"{subject.case} {direction}: {sides}", flush=True)
                self._keep(measure(subject, direction, self._steps, self._where, self._watch))
                collect(self._where.device)
        missing = {key: why for subject in subjects for key, why in subject.missing.items()}
        notes = [f"not here: {operation}={name} {why}" for (operation, name), why in missing.items()]
        failed = [f"failed: {what}" for what in self._failed]
        print("\n".join(["", *table(self._lines), *notes, *failed]), flush=True)
        return 1 if self._failed else 0

    def _keep(self, timings: Sequence[Timing]) -> None:
        card = self._setting.card()
        for timing in timings:
            if timing.error is not None:
                what = f"{timing.subject.case} {timing.direction} {'='.join(timing.side.key)}"
                self._failed.append(f"{what}: {timing.error}")
        found = [line_of(timing, self._setting, card) for timing in timings if timing.error is None]
        record.append(self._out, found, FIELDS)
        self._lines += found
