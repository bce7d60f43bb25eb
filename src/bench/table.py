"""Lines of `benchmarks/bench_model.jsonl` as tables: all of them, or the newest of each comparison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from src.bench import record

COLUMNS = (
    *("model", "tokens", "routing", "side", "compile", "precision", "clip"),
    *("ms", "tok/s", "MFU", "of gemm", "GiB", "speed", "memory"),
)
"""Of `row_of`: MFU is of the data sheet, `of gemm` of the measured product; ratios are to the peer."""

NEWEST_COLUMNS = (
    *("model", "tokens a step", "routing", "precision", "tok/s", "MFU", "GiB"),
    *("peer", "its tok/s", "speed", "memory"),
)
"""Of `newest_rows`."""


def table(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Results as aligned text."""
    rows = [COLUMNS, *(row_of(line) for line in lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def row_of(line: dict[str, Any]) -> tuple[str, ...]:
    """One side: what was measured, time, rates, memory, and the ratio to its peer."""
    case, ratio, step = line["case"], line["ratio"], line["step_ms"]
    return (
        model_of(line),
        f"{case['tokens']:,}",
        case["routing"],
        " ".join([line["engine"], *line["comparison"]["ours"]]) if is_ours(line) else line["engine"],
        case["compile"],
        case["precision"],
        shown(case["clip"], "{:g}"),
        "out of memory" if step is None else f"{step['median']:.1f}",
        shown(line["tokens_per_s"], "{:,.0f}"),
        shown(line["mfu_datasheet"], "{:.1%}"),
        shown(line["mfu_measured"], "{:.1%}"),
        shown(line["peak_gib"]["allocated"], "{:.1f}"),
        "" if ratio is None else verdict(ratio["speed"], line["noise"]),
        "" if ratio is None else shown(ratio["memory"], "{:.2f}"),
    )


def newest(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Our side's last line of each model, tokens, routing, precision, overrides and form of the peer."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        if not is_ours(line) or (line["ratio"] is None and line["outcome"] == record.MEASURED):
            continue
        case, peer = line["case"], line["peer"] or {"name": None, "compile": None}
        what = (
            *(line["card"]["name"], model_of(line), case["tokens"], case["routing"], case["precision"]),
            tuple(line["comparison"]["ours"]),
        )
        found.pop((*what, None, None), None)  # It had no room before.
        found[*what, peer["name"], peer["compile"]] = line
    return list(found.values())


def newest_rows(lines: Iterable[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each of `newest`, sorted by model and tokens, the peer beside ours."""
    chosen = newest(lines)
    chosen.sort(key=lambda line: (model_of(line), line["case"]["tokens"], line["case"]["precision"]))
    return [_newest_row(line) for line in chosen]


def _newest_row(line: dict[str, Any]) -> tuple[str, ...]:
    case, ratio, peer = line["case"], line["ratio"], line["peer"]
    theirs = None if ratio is None else line["tokens_per_s"] / ratio["speed"]
    precision = " ".join([case["precision"], *line["comparison"]["ours"]])
    return (
        *(model_of(line), f"{case['tokens']:,}", case["routing"], precision),
        "out of memory" if line["step_ms"] is None else f"{line['tokens_per_s']:,.0f}",
        shown(line["mfu_datasheet"], "{:.1%}"),
        shown(line["peak_gib"]["allocated"], "{:.1f}"),
        "-" if peer is None else f"{peer['name']}, {peer['compile'] or 'none'} compiled",
        shown(theirs, "{:,.0f}"),
        "-" if ratio is None else verdict(ratio["speed"], line["noise"]),
        "-" if ratio is None else shown(ratio["memory"], "{:.2f}"),
    )


def is_ours(line: dict[str, Any]) -> bool:
    """Whether a line is of the side that is measured against a peer."""
    return bool(line["engine"] == "native")


def model_of(line: dict[str, Any]) -> str:
    """Model, depth, and whether samples are packed."""
    case = line["case"]
    return f"{case['model']} {case['layers']}L" + (" packed" if case["packed"] else "")


def verdict(speed: float, noise: float) -> str:
    """The ratio, or `none` where the sides differ by no more than one differs from itself (BENCH-3)."""
    return f"{speed:.3f}" if abs(speed - 1) > noise else f"none ({speed:.3f})"


def shown(value: float | None, pattern: str) -> str:
    """A number, or `-`."""
    return "-" if value is None else pattern.format(value)
