"""`loss.png`: the loss of a run, or each group of a sweep with a band; `heldout.png` beside it (REPORT-3)."""

from __future__ import annotations

import math
import os
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.records import number
from src.report_facts import Group, RunFacts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES = {"frequencies": "token frequencies", "pairs": "pairs of tokens"}
"""Keys of an evaluation that are drawn as horizontal lines (EVAL-5)."""


def loss_figure(path: Path, run: RunFacts) -> None:
    """Training loss, held-out points and the lines that counts reach."""
    figure, axes = new_axes()
    axes.plot(
        [int(s["step"]) for s in run.steps], [level(s["loss"]) for s in run.steps], lw=1, label="training"
    )
    if run.evaluations:
        steps = [int(e["step"]) for e in run.evaluations]
        axes.plot(steps, [level(e["loss"]) for e in run.evaluations], "o", ms=5, label="held out")
        for style, (key, name) in zip((":", "--"), LINES.items(), strict=True):
            height = number(run.evaluations[-1].get(key))
            if height is not None:
                axes.axhline(height, color="grey", lw=1, ls=style, label=name)
    save(figure, axes, path, run.path.name)


def sweep_figure(path: Path, groups: list[Group]) -> None:
    """Per group the mean of the training loss over the seeds, with a band of one standard deviation."""
    figure, axes = new_axes()
    for group in groups:
        draw_band(axes, group, [{int(s["step"]): level(s["loss"]) for s in run.steps} for run in group.runs])
    save(figure, axes, path, band_title(path, groups))


def heldout_figure(path: Path, groups: list[Group]) -> None:
    """The same of the held-out loss; the first evaluation is left out, for it would set the scale."""
    records = [e for group in groups for run in group.runs for e in run.evaluations]
    in_bits = all(number(e.get("bits_per_byte")) is not None for e in records)
    key, unit = ("bits_per_byte", "bits per byte") if in_bits else ("loss", "nats per token")
    figure, axes = new_axes()
    for group in groups:
        curves = [{int(e["step"]): level(e[key]) for e in run.evaluations if e["step"]} for run in group.runs]
        draw_band(axes, group, curves, marker="o", ms=3)
    save(figure, axes, path, band_title(path, groups), f"held out ({unit})")


def band_title(path: Path, groups: list[Group]) -> str:
    """The sweep's name, and what the bands are if there are any."""
    has_band = any(len(group.runs) > 1 for group in groups)
    return f"{path.parent.name}{', mean ± sd over seed' * has_band}"


def draw_band(axes: Axes, group: Group, curves: list[dict[int, float]], **style: Any) -> None:
    """The mean of a group's curves, step → height, with a band where there are several."""
    steps, means, sds = mean_and_band(curves)
    (line,) = axes.plot(steps, means, lw=1, label=f"{group.name} (n={len(curves)})", **style)
    if len(curves) > 1:
        low = [mean - sd for mean, sd in zip(means, sds, strict=True)]
        high = [mean + sd for mean, sd in zip(means, sds, strict=True)]
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.25, lw=0)


def mean_and_band(curves: list[dict[int, float]]) -> tuple[list[int], list[float], list[float]]:
    """Steps that all curves have, with mean and sample standard deviation (0 for one curve)."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = [[curve[step] for curve in curves] for step in steps]
    means = [statistics.fmean(at) for at in values]
    return steps, means, [statistics.stdev(at) if len(at) > 1 else 0.0 for at in values]


def level(value: Any) -> float:
    """A metric as a height; NaN, which is not drawn, for what is no number."""
    found = number(value)
    return math.nan if found is None else found


def new_axes() -> tuple[Any, Axes]:
    """An empty figure of fixed size; no window system and no state of pyplot is touched."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    return figure, figure.add_subplot()


def save(figure: Any, axes: Axes, path: Path, title: str, height: str = "loss (nats per token)") -> None:
    """Label and write the figure, replacing an older one in one rename."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(height)
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)
