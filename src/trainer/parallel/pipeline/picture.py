"""A timeline as a picture: ranks are rows, boxes have their stage's colour and their micro-batch's number."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.trainer.parallel.pipeline.schedule import Kind
from src.trainer.parallel.pipeline.timeline import Box, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHADES: dict[Kind, tuple[float, str]] = {
    "F": (0.3, "forward"),
    "B": (0.95, "backward"),
    "I": (0.7, "of input"),
    "W": (0.45, "of weights"),
}
"""Kind → how much colour its boxes have, and its name."""
HATCHED: Kind = "W"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "hatch.linewidth": 0.4,
    "svg.fonttype": "none",
    "svg.hashsalt": "schedule",
}
FORMATS = (".svg", ".png", ".pdf")
"""What a picture can be."""


def draw(timeline: Timeline, title: str, path: Path) -> None:
    """Write the picture, in the format of the path's ending; the same bytes for the same timeline."""
    import matplotlib
    from matplotlib.figure import Figure

    ranks, span = timeline.ranks, timeline.makespan
    size = (2.4 + 0.14 * span, 1.3 + 0.32 * len(ranks))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        _boxes(axes, timeline)
        axes.set_xlim(0, span)
        axes.set_ylim(len(ranks) - 0.5, -0.5)
        axes.set_yticks(ranks, [_row(timeline, rank) for rank in ranks], fontsize=7)
        axes.tick_params(axis="x", labelsize=6)
        axes.set_xlabel("time in forwards of one stage", fontsize=7)
        axes.set_title(title, fontsize=8, loc="left")
        _legend(figure, timeline)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _row(timeline: Timeline, rank: int) -> str:
    return f"rank {rank}: {timeline.idle(rank):.1%} idle, {timeline.peak_live(rank)} live"


def _boxes(axes: Axes, timeline: Timeline) -> None:
    import numpy as np
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    groups: dict[tuple[int, Kind, int, bool], list[Box]] = defaultdict(list)
    for box in timeline.boxes:
        groups[box.action.stage, box.action.kind, box.rank, box.is_paired].append(box)
    for (stage, kind, rank, is_paired), boxes in groups.items():
        low, high = rank - 0.4, rank + 0.4
        corners = [[(b.start, low), (b.start, high), (b.end, high), (b.end, low)] for b in boxes]
        patch = PathPatch(  # One path for all of them: a third of the bytes.
            Outline.make_compound_path_from_polys(np.array(corners)),
            facecolor=_colour(stage, kind),
            edgecolor="black" if is_paired else "white",
            linewidth=0.6 if is_paired else 0.4,
            hatch="////" if kind == HATCHED else None,
        )
        axes.add_patch(patch)
    for box in timeline.boxes:
        place = ((box.start + box.end) / 2, box.rank)
        dark = "white" if SHADES[box.action.kind][0] > 0.6 else "black"
        words: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 5, "color": dark}
        axes.text(*place, str(box.action.micro_batch), **words)


def _colour(stage: int, kind: Kind) -> tuple[float, float, float]:
    """The stage's hue, mixed with white as the kind says."""
    from matplotlib import colormaps

    hue, share = colormaps["tab10"](stage % 10), SHADES[kind][0]
    red, green, blue = (1 - share * (1 - part) for part in hue[:3])
    return red, green, blue


def _legend(figure: Any, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    kinds: list[Kind] = [kind for kind in SHADES if any(box.action.kind == kind for box in timeline.boxes)]
    grey = {kind: str(1 - 0.7 * SHADES[kind][0]) for kind in kinds}
    entries = [
        Patch(
            facecolor=grey[kind], hatch="////" if kind == HATCHED else None, label=f"{kind} {SHADES[kind][1]}"
        )
        for kind in kinds
    ]
    if any(box.is_paired for box in timeline.boxes):
        entries.append(Patch(facecolor="white", edgecolor="black", label="may overlap"))
    stages = sorted({box.action.stage for box in timeline.boxes})
    entries += [Patch(facecolor=_colour(stage, "B"), label=f"stage {stage}") for stage in stages]
    figure.legend(handles=entries, loc="outside lower center", ncols=8, fontsize=6, frameon=False)
