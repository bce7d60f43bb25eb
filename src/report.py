"""`report.md`, `report.json`, `loss.png` and `heldout.png`, made from run directories alone (REPORT)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from src.errors import UserError
from src.launchers.closing import curve, heldout, loads, next_commands, summary
from src.records import Record, read_samples, write_atomic, write_json
from src.report_facts import (
    AVERAGED,
    JUDGED_STEPS,
    Group,
    RunFacts,
    average,
    find_runs,
    groups,
    mesh_differences,
    read_run,
    row,
    speed_notes,
    swept_keys,
)
from src.report_seeds import MEASURES, by_seed, seed_table

SCHEMA = 1
COLUMNS = ("state", "exit_code", "steps", "last_loss", "best_loss", "heldout_loss", "tokens_per_s")
"""Columns of a sweep's table between the swept keys and reason and directory."""


def write_report(directory: Path, figure: bool = True) -> Path:
    """Write the report of a run or of a sweep beside its files, and return the path of `report.md`.

    Args:
        directory: a run directory, or one with run directories below it.
        figure: whether to draw `loss.png`, which imports matplotlib.

    Raises:
        UserError: there is no run.
    """
    if (directory / "config.yaml").is_file():
        return write_run_report(read_run(directory), figure)
    runs, unread = find_runs(directory)
    if not runs:
        raise UserError(f"{directory} holds no run: neither config.yaml nor */config.yaml is there")
    return write_sweep_report(directory, runs, unread, figure)


def write_run_report(run: RunFacts, figure: bool) -> Path:
    """The report of one run."""
    facts = {"schema": SCHEMA, "kind": "run", **row(run), "evaluations": run.evaluations}
    write_json(run.path / "report.json", facts)
    write_atomic(run.path / "report.md", run_text(run))
    if figure and run.steps:
        from src.figures import loss_figure

        loss_figure(run.path / "loss.png", run)
    return run.path / "report.md"


def run_text(run: RunFacts) -> str:
    """Markdown of one run."""
    facts = [[key, show(value)] for key, value in row(run).items()]
    origin = [["commit", show(run.code.get("commit"))], ["data key", show(run.code.get("data_key"))]]
    parts = [f"# {run.path.name}", table(["", ""], [*facts, *origin])]
    if run.steps:
        parts += [summary(run.steps) + ".", "![loss](loss.png)"]
    if run.evaluations:
        parts += ["## Held out", fenced(heldout(run.evaluations[-1])), evaluations_table(run.evaluations)]
    if run.steps:
        parts += ["## Training loss and experts", fenced([*curve(run.steps), *loads(run.steps[-1])])]
    samples = [s for s in read_samples(run.path / "samples.jsonl") if s["mode"] == "greedy"]
    if samples:
        parts += [
            "## Samples",
            *(f"Step {s['step']}:\n\n{fenced([s['prompt'] + s['text']])}" for s in samples),
        ]
    overrides = [f"{key}={value}" for key, value in run.overrides.items()]
    parts += ["## Next", fenced(next_commands(run.path, overrides))]
    return "\n\n".join(parts) + "\n"


def evaluations_table(evaluations: list[Record]) -> str:
    """Held-out loss by step."""
    rows = [[show(e["step"]), show(e["loss"]), show(e["bits_per_byte"])] for e in evaluations]
    return table(["step", "nats per token", "bits per byte"], rows)


def write_sweep_report(directory: Path, runs: list[RunFacts], unread: list[str], figure: bool) -> Path:
    """The report of the runs below a directory; `unread` are lines on those that could not be read."""
    found, notes = groups(runs)
    notes = [*notes, *speed_notes(found), *unread]
    meshes = mesh_differences(runs)
    keys = swept_keys(runs)
    rows = [{**{key: run.overrides.get(key) for key in keys}, **row(run)} for run in runs]
    averages = [average(group) for group in found]
    facts = {"schema": SCHEMA, "kind": "sweep", "swept": keys, "runs": rows, "groups": averages}
    facts |= {"by_seed": by_seed(found), "notes": notes, "meshes": meshes}
    write_json(directory / "report.json", facts)
    write_atomic(directory / "report.md", sweep_text(directory, keys, rows, found, notes, meshes))
    if figure and found:
        from src.figures import heldout_figure, sweep_figure

        sweep_figure(directory / "loss.png", found)
        if has_curves(found):
            heldout_figure(directory / "heldout.png", found)
    return directory / "report.md"


def has_curves(found: list[Group]) -> bool:
    """Whether every run was evaluated during training, so that held-out curves can be drawn."""
    return all(len(run.evaluations) > 2 for group in found for run in group.runs)


def sweep_text(
    directory: Path,
    keys: list[str],
    rows: list[Record],
    found: list[Group],
    notes: list[str],
    meshes: list[Record],
) -> str:
    """Markdown of a sweep: its runs, means over seeds, what was not averaged, differences between meshes."""
    header, cells = sweep_table(keys, rows)
    parts = [f"# {directory.name}", table(header, cells)]
    parts += ["![loss](loss.png)"] if found else ["No run is done."]
    parts += ["![held out](heldout.png)"] if found and has_curves(found) else []
    parts += [*comparison(found), *notes]
    if meshes:
        parts += [
            "## Meshes: largest relative difference from the first",
            table(list(meshes[0]), mesh_rows(meshes)),
            f"Judged are the first {JUDGED_STEPS} steps: rounding alone grows from step to step after that.",
        ]
    return "\n\n".join(parts) + "\n"


def comparison(found: list[Group]) -> list[str]:
    """Headed tables: each group's means over the seeds, and the groups at each seed that they share."""
    if not found:
        return []
    averages = [(group.name, average(group)) for group in found]
    lines = [[name, show(a["n"]), *(spread(a.get(v)) for v in AVERAGED)] for name, a in averages]
    parts = ["## Mean ± sd over seed", table(["", "n", *AVERAGED], lines)]
    compared = by_seed(found)
    if compared is not None:
        parts += [f"## By seed: {MEASURES[compared['measure']]}", table(*seed_table(compared))]
    return parts


def sweep_table(keys: list[str], rows: list[Record]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the table of jobs (REPORT-1); directories by name, for it lies above them."""
    header = [*keys, *COLUMNS, "reason", "directory"]
    shown = [{**one, "directory": Path(one["directory"]).name} for one in rows]
    return header, [[show(one[name]) for name in header] for one in shown]


def mesh_rows(meshes: list[Record]) -> list[list[str]]:
    """Cells of the table of REPORT-2."""
    return [[f"{v:.2e}" if isinstance(v, float) else show(v) for v in one.values()] for one in meshes]


def spread(value: Record | None) -> str:
    """`mean ± sd` with two digits of the deviation, the mean as far; the mean alone for one run."""
    if value is None:
        return "-"
    mean, sd = value["mean"], value["sd"]
    if sd is None or not (math.isfinite(mean) and math.isfinite(sd) and sd > 0):
        return show(mean) + ("" if sd is None else f" ± {show(sd)}")
    decimals = max(0, 1 - math.floor(math.log10(sd)))
    return f"{mean:,.{decimals}f} ± {sd:,.{decimals}f}"


def show(value: Any) -> str:
    """A cell: numbers with five significant digits, a dash for null, no line breaks or bars."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"
    return str(value).replace("\n", " ").replace("|", "\\|")


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table whose columns line up as plain text too."""
    widths = [max(len(line[k]) for line in [header, *rows]) for k in range(len(header))]
    lines = [header, ["-" * max(3, width) for width in widths], *rows]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in padded)


def fenced(lines: list[str]) -> str:
    """Lines as they are; the fence is longer than any in them."""
    text = "\n".join(lines)
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"
