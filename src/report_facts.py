"""What run directories say: a row per run, groups over seeds, differences between meshes (REPORT-1 to 3)."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from src.compose import load_config
from src.config import Config
from src.errors import UserError
from src.naming import composition
from src.records import Record, number, read_json, read_steps

AVERAGED = ("last_loss", "best_loss", "heldout_loss", "bits_per_byte", "tokens_per_s")
"""Values of a row that are averaged over seeds."""
JUDGED_STEPS = 5
"""Differences between meshes are judged over the first steps alone.

One step differs by summation order, 1e-12 in fp64 and 1e-6 in fp32, but training multiplies that from step to
step, and the first token that is routed elsewhere shows in the loss: two correct fp32 runs of the default
model, with Adam at its default rate, were 1e-7 apart at step 10 and 1e-3 at step 20. A wrong scale shows at
the first step."""
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4}
"""Largest relative difference over the first steps that is not flagged, by precision."""
COARSE = 5e-2
"""The same where compute is bf16."""


@dataclass(frozen=True)
class RunFacts:
    """One run directory, read once."""

    path: Path
    config: Config
    overrides: dict[str, str]
    """The command's overrides by key, `+` left out."""
    status: Record
    code: Record
    steps: list[Record]
    evaluations: list[Record]
    jobs: int = 1
    """Jobs of its sweep that shared the machine with it, itself included."""

    @property
    def state(self) -> str:
        """State of `status.json`; unknown where that is missing."""
        return str(self.status.get("state", "unknown"))


def read_run(run: Path) -> RunFacts:
    """Everything that a report needs from a run directory; raises UserError without a `config.yaml`."""
    return RunFacts(
        path=run,
        config=load_config(run / "config.yaml"),
        overrides=read_overrides(run / "overrides.yaml"),
        status=read_json(run / "status.json") or {},
        code=read_json(run / "code.json") or {},
        steps=read_steps(run / "metrics.jsonl"),
        evaluations=read_steps(run / "evaluation.jsonl"),
        jobs=int((read_json(run / "plan.json") or {}).get("jobs", 1)),
    )


def overrides_text(overrides: list[str]) -> str:
    """Text of `overrides.yaml`: a YAML list of quoted strings."""
    return "".join(f"- {json.dumps(override)}\n" for override in overrides) or "[]\n"


def override_list(path: Path) -> list[str]:
    """The overrides in a file that `overrides_text` made; none where it is missing."""
    if not path.is_file():
        return []
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("- ")]
    return [str(json.loads(line[2:])) for line in lines]


def read_overrides(path: Path) -> dict[str, str]:
    """`overrides.yaml` as key → value text."""
    pairs = [override.lstrip("+").partition("=") for override in override_list(path)]
    return {key: value for key, _, value in pairs}


def find_runs(directory: Path) -> tuple[list[RunFacts], list[str]]:
    """The runs directly below a sweep's directory, in its order, and a line for each that cannot be read."""
    runs, notes = [], []
    for path in sorted(directory.glob("*/config.yaml")):
        try:
            runs.append(read_run(path.parent))
        except UserError as error:
            notes.append(f"{path.parent.name} is left out, for its config is of another version: {error}")
    return sorted(runs, key=lambda run: (run.config.sweep.index or 0, run.path.name)), notes


def row(run: RunFacts) -> Record:
    """State, steps, losses and speed of one run (REPORT-1)."""
    losses = finite(step["loss"] for step in run.steps)
    heldout = run.evaluations[-1] if run.evaluations else {}
    speeds = finite(step["tokens_per_s"] for step in run.steps)
    reason = run.status.get("reason") or {}
    return {
        "directory": str(run.path),
        "state": run.state,
        "exit_code": run.status.get("exit_code"),
        "reason": f"{reason.get('type')}: {reason.get('message')}" if reason else None,
        "steps": int(run.steps[-1]["step"]) if run.steps else 0,
        "last_loss": losses[-1] if losses else None,
        "best_loss": min(losses, default=None),
        "heldout_loss": number(heldout.get("loss")),
        "bits_per_byte": number(heldout.get("bits_per_byte")),
        "tokens_per_s": statistics.median(speeds) if speeds else None,
        "side_by_side": run.jobs,
    }


def finite(values: Iterable[Any]) -> list[float]:
    """The values that are finite numbers."""
    numbers = (number(value) for value in values)
    return [value for value in numbers if value is not None and math.isfinite(value)]


def swept_keys(runs: list[RunFacts]) -> list[str]:
    """Keys that the runs' sweep varies; without one the override keys whose values differ."""
    named = dict.fromkeys(key for run in runs for key in run.config.sweep.keys)
    if named:
        return list(named)
    keys = dict.fromkeys(key for run in runs for key in run.overrides)
    return [key for key in keys if len({run.overrides.get(key) for run in runs}) > 1]


def origin(run: RunFacts) -> dict[str, Any]:
    """What must be equal for runs to be averaged (REPORT-3)."""
    config = run.config
    return {
        "code": run.code.get("code_identity"),
        "data key": run.code.get("data_key"),
        "tokenizer": json.dumps(asdict(config.tokenizer), sort_keys=True),
        "split": config.data.split_seed,
        "packing": config.data.packing,
        "steps": config.max_steps,
        "schedule horizon": config.lr_schedule.horizon or config.max_steps,
    }


@dataclass(frozen=True)
class Group:
    """Done runs that differ in nothing but `seed`."""

    keys: dict[str, str]
    """The swept keys but `seed`."""
    runs: list[RunFacts]
    apart: dict[str, str]
    """What sets it apart from other groups of the same keys, such as its code; empty if nothing does."""

    @property
    def name(self) -> str:
        """The group's name, with what sets it apart."""
        apart = ", ".join(f"{key} {value[:8]}" for key, value in self.apart.items())
        return group_name(self.keys, self.runs) + (f" ({apart})" if apart else "")


def group_name(keys: dict[str, str], runs: list[RunFacts]) -> str:
    """`mesh=ep2`, or the composition where nothing but the seed is swept."""
    return " ".join(f"{key}={value}" for key, value in keys.items()) or composition(runs[0].config)


def groups(runs: list[RunFacts]) -> tuple[list[Group], list[str]]:
    """Runs that may be averaged, and a line for each set of keys that had to be split (REPORT-3)."""
    keys = [key for key in swept_keys(runs) if key != "seed"]
    found: list[Group] = []
    notes: list[str] = []
    for values, same in partition(runs, lambda run: [run.overrides.get(key) for key in keys]):
        chosen = {key: value for key, value in zip(keys, values, strict=True) if value is not None}
        done = [run for run in same if run.state == "done"]
        parts = partition(done, lambda run: list(origin(run).values()))
        names = differing(done)
        found += [
            Group(chosen, part, {name: str(origin(part[0])[name]) for name in names}) for _, part in parts
        ]
        if len(parts) > 1:
            notes.append(f"{group_name(chosen, same)}: not averaged together, for {', '.join(names)} differ")
        if len(done) < len(same):
            notes.append(f"{group_name(chosen, same)}: {len(done)} of {len(same)} runs are done")
    return found, notes


def differing(runs: list[RunFacts]) -> list[str]:
    """Names of the origins that are not the same for all runs."""
    origins = [origin(run) for run in runs]
    names = origins[0] if origins else {}
    return [name for name in names if len({str(one[name]) for one in origins}) > 1]


def partition(
    runs: list[RunFacts], key: Callable[[RunFacts], list[Any]]
) -> list[tuple[list[Any], list[RunFacts]]]:
    """Runs of equal keys together, in the order of their first members."""
    parts: dict[str, tuple[list[Any], list[RunFacts]]] = {}
    for run in runs:
        value = key(run)
        parts.setdefault(repr(value), (value, []))[1].append(run)
    return list(parts.values())


def average(group: Group) -> Record:
    """Mean and sample standard deviation over the seeds, with n; sd is null for one run."""
    rows = [row(run) for run in group.runs]
    summary: Record = {
        "keys": group.keys,
        "apart": group.apart,
        "n": len(rows),
        "seeds": [run.config.seed for run in group.runs],
    }
    for name in AVERAGED:
        values = finite(one[name] for one in rows)
        if values:
            sd = statistics.stdev(values) if len(values) > 1 else None
            summary[name] = {"mean": statistics.fmean(values), "sd": sd, "n": len(values)}
    return summary


def speed_notes(found: list[Group]) -> list[str]:
    """What tokens/s means where jobs shared the machine: a line for each group that is not of runs alone."""
    notes = []
    for group in found:
        counts = sorted({run.jobs for run in group.runs})
        if len(counts) > 1:
            words = " and ".join(f"{k} (n={sum(r.jobs == k for r in group.runs)})" for k in counts)
            notes.append(f"tokens_per_s of {group.name} mixes runs of {words} jobs side by side.")
    shared = sorted({run.jobs for group in found for run in group.runs} - {1})
    if shared:
        sizes = ", ".join(str(k) for k in shared)
        notes.append(f"Jobs ran {sizes} side by side: their tokens_per_s is that of a shared machine.")
    return notes


def mesh_differences(runs: list[RunFacts]) -> list[Record]:
    """Largest relative differences from the first mesh in loss and norm, all else equal (REPORT-2)."""
    keys = [key for key in swept_keys(runs) if key != "mesh" and not key.startswith("mesh.")]
    found = []
    trained = [run for run in runs if run.steps]
    for _, same in partition(
        trained, lambda run: [[run.overrides.get(key) for key in keys], *origin(run).values()]
    ):
        first, *others = same
        for other in others:
            if other.config.mesh != first.config.mesh:
                found.append(compare(first, other))
    return found


def compare(first: RunFacts, other: RunFacts) -> Record:
    """One pair of meshes: differences over all common steps, and over the first ones, which are judged."""
    keys, early = ("loss", "grad_norm"), [step for step in first.steps if step["step"] <= JUDGED_STEPS]
    judged = {f"early_{key}": largest_difference(early, other.steps, key) for key in keys}
    limit = TOLERANCE.get(precision(first.config), COARSE)
    return {
        "seed": first.config.seed,
        "first": first.config.mesh.spec,
        "mesh": other.config.mesh.spec,
        **{key: largest_difference(first.steps, other.steps, key) for key in keys},
        **judged,
        "tolerance": limit,
        "flagged": any(value is None or value > limit for value in judged.values()),
    }


def precision(config: Config) -> str:
    """The precision's name; `auto` is judged as fp32, the stricter of the two it can mean."""
    return "fp32" if config.precision.name == "auto" else config.precision.name


def largest_difference(first: list[Record], other: list[Record], key: str) -> float | None:
    """max over common steps of |a − b| / |a|; None without one, or with a value that is not finite."""
    before = {step["step"]: number(step[key]) for step in first}
    pairs = [(before[step["step"]], number(step[key])) for step in other if step["step"] in before]
    if not pairs:
        return None
    largest = 0.0
    for a, b in pairs:
        if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
            return None
        largest = max(largest, abs(a - b) / max(abs(a), 1e-300))
    return largest
