"""`loss.png`: the loss of a run, or the mean of each group of a sweep with a band (REPORT-3)."""

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
        steps, means, sds = mean_and_band(group)
        (line,) = axes.plot(steps, means, lw=1, label=f"{group.name} (n={len(group.runs)})")
        if len(group.runs) > 1:
            low = [mean - sd for mean, sd in zip(means, sds, strict=True)]
            high = [mean + sd for mean, sd in zip(means, sds, strict=True)]
            axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.25, lw=0)
    has_band = any(len(group.runs) > 1 for group in groups)
    save(figure, axes, path, f"{path.parent.name}{', mean ± sd over seed' * has_band}")


def mean_and_band(group: Group) -> tuple[list[int], list[float], list[float]]:
    """Steps that all runs of the group have, with mean and sample standard deviation (0 for one run)."""
    curves = [{int(s["step"]): level(s["loss"]) for s in run.steps} for run in group.runs]
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


def save(figure: Any, axes: Axes, path: Path, title: str) -> None:
    """Label and write the figure, replacing an older one in one rename."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)
