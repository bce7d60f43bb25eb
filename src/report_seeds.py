"""Groups of a sweep side by side, seed by seed: what a mean over few seeds cannot show (REPORT-1)."""

from __future__ import annotations

import math
from typing import Any

from src.records import Record
from src.report_facts import Group, row

MEASURES = {"bits_per_byte": "bits per byte", "heldout_loss": "nats per token", "last_loss": "last loss"}
"""What groups are compared by: the first that all runs have; only bits per byte know no tokenizer."""


def by_seed(found: list[Group]) -> Record | None:
    """The last held-out value of each group at each seed, and how far it lies above the first group's.

    Returns:
        `measure`, `groups` (names), `rows` of `seed`, `values` and `differences` (value − that of the first
        group, from the second group on); None unless two groups have a seed in common.
    """
    for measure in MEASURES:
        rows = _rows(found, measure)
        if rows:
            return {"measure": measure, "groups": [group.name for group in found], "rows": rows}
    return None


def _rows(found: list[Group], measure: str) -> list[Record]:
    if len(found) < 2:
        return []
    values = [{run.config.seed: row(run)[measure] for run in group.runs} for group in found]
    shared = sorted(set.intersection(*(set(one) for one in values)))
    rows = []
    for seed in shared:
        at = [one[seed] for one in values]
        if any(value is None or not math.isfinite(value) for value in at):
            return []
        rows.append({"seed": seed, "values": at, "differences": [value - at[0] for value in at[1:]]})
    return rows


def seed_table(compared: Record) -> tuple[list[str], list[list[str]]]:
    """Header and cells; four decimals, for seeds differ in the third."""
    names: list[str] = compared["groups"]
    header = ["seed", *names, *(f"{name} − {names[0]}" for name in names[1:])]
    return header, [_cells(one) for one in compared["rows"]]


def _cells(one: dict[str, Any]) -> list[str]:
    values = [f"{value:.4f}" for value in one["values"]]
    return [str(one["seed"]), *values, *(f"{value:+.4f}" for value in one["differences"])]
