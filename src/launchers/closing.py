"""The closing screen of a run, from the files it left (CLOSE-1)."""

from __future__ import annotations

import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from src.compose import load_config
from src.config import Config, MeshConfig, SweepConfig
from src.launchers.console import clock
from src.mesh_spec import parse
from src.naming import key_of
from src.records import Record, number, read_samples, read_steps
from src.validate import validate

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 48
"""Most columns of a sparkline or a load strip."""
SAMPLE = 240
"""Most characters of a sample."""
MESHES = ("pp2ep2", "ep2", "pp2", "dp2")
"""Meshes that a run is worth comparing with."""
OF_ONE_RUN = ("run_name", "resume", "dry_run")
"""Keys that a command for another run does without."""


def closing_screen(run: Path, overrides: list[str]) -> str:
    """Steps, tokens, time; held-out loss, loss curve, expert load, a sample and three next commands."""
    steps = read_steps(run / "metrics.jsonl")
    evaluations = read_steps(run / "evaluation.jsonl")
    samples = read_samples(run / "samples.jsonl")
    rows = [("", "")]
    if steps:
        rows += [("done", summary(steps))]
    rows += [("directory", str(run))]
    rows += labelled("held-out", heldout(evaluations[-1]) if evaluations else [])
    rows += labelled("loss", curve(steps))
    rows += labelled("experts", loads(steps[-1]) if steps else [])
    rows += labelled("sample", sample(samples))
    rows += labelled("next", next_commands(run, overrides))
    return "\n".join(f"{label:<10} {text}".rstrip() for label, text in rows)


def labelled(label: str, lines: list[str]) -> list[tuple[str, str]]:
    """The lines, with the label before the first."""
    return [(label if number == 0 else "", line) for number, line in enumerate(lines)]


def summary(steps: list[Record]) -> str:
    """Steps, tokens, time in steps and speed."""
    last = steps[-1]
    seconds = sum(number(step["step_time"]) or 0.0 for step in steps)
    tokens = int(last["tokens_total"])
    speed = f" ({tokens / seconds:,.0f} tokens/s)" if seconds else ""
    return f"{last['step']} steps, {tokens:,} tokens in {clock(seconds)}{speed}"


def heldout(evaluation: Record) -> list[str]:
    """The held-out loss among the lines that counts alone reach, highest first (EVAL-5)."""
    known = {"uniform": "all tokens alike", "frequencies": "token frequencies", "pairs": "pairs of tokens"}
    lines = [(name, number(evaluation.get(key))) for key, name in known.items()]
    lines += [("this model", number(evaluation.get("loss")))]
    ranked = sorted(((value, name) for name, value in lines if value is not None), reverse=True)
    bits = number(evaluation.get("bits_per_byte"))
    extra = f"  {bits:.3f} bits per byte" if bits is not None else ""
    return [f"{value:7.3f} nats  {name}{extra if name == 'this model' else ''}" for value, name in ranked]


def curve(steps: list[Record]) -> list[str]:
    """The loss from the first step to the last as a sparkline between its ends."""
    losses = [loss for loss in (number(step["loss"]) for step in steps) if loss is not None]
    if not losses:
        return []
    return [f"{losses[0]:.3f} {strip(shrink(losses, WIDTH))} {losses[-1]:.3f}"]


def loads(last: Record) -> list[str]:
    """Per MoE layer: the experts' shares, max over mean, and the experts that got nothing."""
    layers = (last.get("moe") or {}).get("layers", {})
    lines = []
    for layer, load in sorted(layers.items(), key=lambda item: int(item[0])):
        shares = [number(share) or 0.0 for share in load["load"]]
        ratio, dead = number(load["max_over_mean"]), load["dead"]
        lines.append(
            f"layer {layer:<3} {strip(shrink(shares, WIDTH), low=0.0)} max/mean {ratio:.2f}, {dead} dead"
        )
    return lines


def sample(samples: list[Record]) -> list[str]:
    """The first prompt's greedy continuations before the first step and after the last, a line each."""
    greedy = [s for s in samples if s["mode"] == "greedy"]
    if not greedy:
        return []
    first, last = greedy[0], next(s for s in greedy if s["step"] == greedy[-1]["step"])
    shown = [("before", first)] if first["step"] == 0 else []
    shown += [("after", last)] if last["step"] > 0 else []
    return [f"{when:<7} {continuation(record)}" for when, record in shown]


def continuation(record: Record) -> str:
    """Prompt and text on one line."""
    text = repr(record["prompt"])[1:-1] + " │ " + repr(record["text"])[1:-1]
    return text if len(text) <= SAMPLE else text[: SAMPLE - 1] + "…"


def shrink(values: list[float], width: int) -> list[float]:
    """At most `width` values: means of neighbours."""
    if len(values) <= width:
        return values
    edges = [len(values) * k // width for k in range(width + 1)]
    parts = [values[a:b] for a, b in pairwise(edges)]
    return [sum(part) / len(part) for part in parts]


def strip(values: list[float], low: float | None = None) -> str:
    """One block a value, from the lowest (or `low`) to the highest; values that are not finite are blank."""
    finite = [value for value in values if abs(value) < float("inf")]
    if not finite:
        return " " * len(values)
    low = min(finite) if low is None else low
    span = max(finite) - low
    top = len(BLOCKS) - 1
    return "".join(
        BLOCKS[round((value - low) / span * top) if span > 0 else 0] if abs(value) < float("inf") else " "
        for value in values
    )


def next_commands(run: Path, overrides: list[str]) -> list[str]:
    """Three commands that lead on from this run."""
    mesh = other_mesh(run, overrides)
    checkpoints = shlex.join(["python", "scripts/checkpoints.py", "list", str(run)])
    return [
        f"{command(overrides, f'mesh={mesh}')}  # the same losses on another mesh"
        if mesh
        else f"{checkpoints}  # the checkpoints of this run",
        f"{command(['-m', *overrides], 'seed=0,1,2')}  # three seeds, mean and spread",
        f"{shlex.join(['python', 'scripts/report.py', str(run)])}  # report.md and loss.png again",
    ]


def other_mesh(run: Path, overrides: list[str]) -> str | None:
    """A mesh that this run could have had instead; None if no other suits its sizes."""
    typed = [o.partition("=")[2] for o in overrides if o.startswith("mesh=")]
    meshes = ["single", *MESHES] if typed and typed[-1] != "single" else list(MESHES)
    if not (run / "config.yaml").is_file():
        return meshes[0]
    config = load_config(run / "config.yaml")
    return next((spec for spec in meshes if spec != config.mesh.spec and _suits(config, spec)), None)


def _suits(config: Config, spec: str) -> bool:
    axes = {} if spec == "single" else parse(spec)
    mesh = MeshConfig(**axes, spec=spec)
    return not validate(replace(config, mesh=mesh, sweep=SweepConfig()))


def command(overrides: list[str], new: str) -> str:
    """`python train.py` with these overrides and `new`: each key once, and none that means one directory."""
    key = key_of(new)
    last = {key_of(override): override for override in overrides}
    gone = {name for name in last if name in (key, *OF_ONE_RUN) or name.startswith(f"{key}.")}
    kept = [override for name, override in last.items() if name not in gone]
    return shlex.join(["python", "train.py", *kept, new])
