"""Mesh specs such as `pp2ep2`: axis-number pairs in any order (CFG-8)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from src.config import MeshConfig
from src.trainer.parallel.layout import AXES, spec

GRAMMAR = (
    "auto, single, or axis-number pairs over pp rep dp cp ep tp in any order, each axis once, "
    "numbers from 1 without leading zero: pp2ep2, dp4, pp4dp2ep8"
)

_PAIR = re.compile(rf"({'|'.join(AXES)})([1-9][0-9]*)")


def parse(spec: str) -> dict[str, int]:
    """Axis → size for the axes that a spec names; `ValueError` shows the grammar."""
    pairs = _PAIR.findall(spec)
    axes = dict(pairs)
    if not pairs or "".join(axis + size for axis, size in pairs) != spec or len(axes) != len(pairs):
        raise ValueError(f"{spec!r} is no mesh: {GRAMMAR}")
    return {axis: int(size) for axis, size in axes.items()}


def is_spec(name: str) -> bool:
    """Whether the name follows the grammar; `auto` and `single` are files, not specs."""
    try:
        parse(name)
    except ValueError:
        return False
    return True


def canonical(axes: Mapping[str, int]) -> str:
    """The spec in design order without the axes of size 1; `single` if none is left."""
    mesh = MeshConfig()
    for axis, size in axes.items():
        setattr(mesh, axis, size)
    return spec(mesh)
