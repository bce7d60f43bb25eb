"""Lines of `benchmarks/bench_NAME.jsonl`, one a side, case and direction, and their table (BENCH-7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from src.bench import facts
from src.bench.clock import Ceilings, quantile, spread
from src.bench.op import DIRECTIONS, Cost, Timing
from src.bench.place import Key, Place
from src.bench.record import FIELDS as MODEL_FIELDS
from src.bench.record import FLAG, MAYBE_NUMBER, MEASURED, NUMBER, OUT_OF_MEMORY, TEXT, Maybe, read
from src.bench.table import shown, verdict

SCHEMA = 2
BOUNDS = ("gemm", "copy", "none")

FIELDS: dict[str, Any] = {
    **{name: MODEL_FIELDS[name] for name in ("schema", "date", "commit", "dirty", "command")},
    **{name: MODEL_FIELDS[name] for name in ("card", "versions", "ceilings", "outcome")},
    "operation": TEXT,
    "implementation": TEXT,
    "auto": FLAG,
    "compiled": FLAG,
    "case": {"name": TEXT, "sizes": (dict,)},
    "dtype": TEXT,
    "direction": DIRECTIONS,
    "ms": Maybe({"median": NUMBER, "p10": NUMBER, "p90": NUMBER, "blocks": (list,)}),
    "flops": (int, NoneType),
    "bytes": (int, NoneType),
    "tflops": MAYBE_NUMBER,
    "gbs": MAYBE_NUMBER,
    "bound": BOUNDS,
    "share": MAYBE_NUMBER,
    "other": Maybe({"operation": TEXT, "implementation": TEXT}),
    "ratio": MAYBE_NUMBER,
    "noise": MAYBE_NUMBER,
    "extra_gib": MAYBE_NUMBER,
    "launches": (int, NoneType),
}
"""Field → the types it takes, the texts it is one of, or the fields inside it."""

COLUMNS = (
    *("case", "operation", "implementation", "direction", "ms", "p10", "p90"),
    *("TFLOP/s", "GB/s", "of best", "time over", "ratio", "GiB", "launches"),
)
"""Of `row_of`: `of best` is the share of the measured ceiling, `ratio` the time over that of `time over`."""
NAMES = COLUMNS.index("ms")
"""Columns that hold words."""


@dataclass(frozen=True)
class Setting:
    """What all lines of one run of a script share."""

    where: Place
    ceilings: Ceilings
    clock: float | None
    """Of the card before anything was timed."""
    origin: Mapping[str, Any]
    versions: Mapping[str, Any]

    @classmethod
    def of(cls, where: Place, ceilings: Ceilings) -> Setting:
        """As things are now; asking costs processes, so lines do not ask again."""
        clock = facts.query_number(where.device, facts.CLOCK)
        return cls(where, ceilings, clock, facts.origin(), facts.versions(where.device))

    def card(self) -> dict[str, Any]:
        """The card, with its clock now."""
        return facts.card(self.where.device, self.clock)


def line_of(timing: Timing, setting: Setting, card: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured of one side."""
    cost, subject, other = timing.side.cost[timing.direction], timing.subject, timing.other
    ms = timing.median if timing.blocks else None
    return {
        "schema": SCHEMA,
        **setting.origin,
        "card": dict(card),
        "versions": dict(setting.versions),
        "ceilings": vars(setting.ceilings).copy(),
        "outcome": OUT_OF_MEMORY if ms is None else MEASURED,
        **_named(timing.side.key),
        "auto": timing.side.is_auto,
        "compiled": timing.side.is_compiled,
        "case": {"name": subject.case, "sizes": dict(subject.sizes)},
        "dtype": str(setting.where.dtype).removeprefix("torch."),
        "direction": timing.direction,
        "ms": None if ms is None else _quantiles(timing),
        "flops": cost.flops,
        "bytes": cost.bytes,
        **_rates(cost, ms, setting.ceilings),
        "other": None if other is None else _named(other.side.key),
        "ratio": None if other is None or ms is None else ms / other.median,
        "noise": None if ms is None else max(map(spread, _medians(timing))),
        "extra_gib": None if ms is None else _gib(timing.warm.extra_bytes),
        "launches": None if ms is None else timing.warm.launches,
    }


def _medians(timing: Timing) -> list[list[float]]:
    """Of the blocks of a side, and of the side that it is compared with."""
    return [side.medians for side in (timing, timing.other) if side is not None]


def _gib(size: int | None) -> float | None:
    return None if size is None else size / 2**30


def _named(key: Key) -> dict[str, str]:
    return {"operation": key[0], "implementation": key[1]}


def _quantiles(timing: Timing) -> dict[str, Any]:
    p10, p90 = (quantile(timing.times, share) for share in (0.1, 0.9))
    return {"median": timing.median, "p10": p10, "p90": p90, "blocks": timing.blocks}


def _rates(cost: Cost, ms: float | None, ceilings: Ceilings) -> dict[str, Any]:
    """Rates, and the share of the ceiling of what is counted: operations are of products or of memory."""
    assert cost.flops is None or cost.bytes is None
    bound = "gemm" if cost.flops is not None else "copy" if cost.bytes is not None else "none"
    tflops = None if ms is None or cost.flops is None else cost.flops / ms / 1e9
    gbs = None if ms is None or cost.bytes is None else cost.bytes / ms / 1e6
    share = None
    if tflops is not None:
        share = tflops / ceilings.gemm_tflops
    elif gbs is not None:
        share = gbs / ceilings.copy_gbs
    return {"tflops": tflops, "gbs": gbs, "bound": bound, "share": share}


def table(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Results as aligned text, names to the left."""
    rows = [COLUMNS, *(row_of(line) for line in lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(_aligned, row, widths, range(len(row)))).rstrip() for row in rows]


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column < NAMES else cell.rjust(width)


def row_of(line: Mapping[str, Any]) -> tuple[str, ...]:
    """One side: what was measured, time, rate, share of the ceiling, and the ratio to another side."""
    ms, other = line["ms"] or {}, line["other"]
    return (
        *(line["case"]["name"], line["operation"], _implementation(line), line["direction"]),
        f"{ms['median']:.4f}" if ms else "out of memory",
        *(shown(ms.get(name), "{:.4f}") for name in ("p10", "p90")),
        shown(line["tflops"], "{:.1f}"),
        shown(line["gbs"], "{:.0f}"),
        shown(line["share"], "{:.1%}"),
        "-" if other is None else f"{other['operation']}={other['implementation']}",
        _ratio(line),
        shown(line["extra_gib"], "{:.2f}"),
        shown(line["launches"], "{:d}"),
    )


def _ratio(line: Mapping[str, Any]) -> str:
    """`1` of the side that the others are compared with."""
    if line["ratio"] is None:
        return "-"
    itself = line["other"] == _named((line["operation"], line["implementation"]))
    return "1" if itself else verdict(line["ratio"], line["noise"])


def _implementation(line: Mapping[str, Any]) -> str:
    """Its name, and whether it is what `auto` takes and whether it was compiled."""
    marks = [name for name in ("auto", "compiled") if line[name] and name != line["implementation"]]
    return f"{line['implementation']} ({', '.join(marks)})" if marks else str(line["implementation"])


def newest(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last line of each card, case, operation, implementation and direction, in their first order."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        case, names = line["case"], ("operation", "implementation", "compiled", "direction")
        what = (line["card"]["name"], case["name"], case["sizes"].get("tokens"), *(line[n] for n in names))
        found[what] = line
    return list(found.values())


def read_current(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that are of this schema; none if there is no file."""
    lines = read(path) if path.is_file() else []
    return [line for line in lines if line["schema"] == SCHEMA]
