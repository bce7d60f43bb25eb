"""Shell completion: Hydra's own, and what no listing of config files shows: sizes and mesh specs (HELP-2).

    eval "$(python train.py -sc install=bash)"

Sizes and specs stay out of Hydra's listings, for `mesh=glob(*)` must keep meaning the files (HYD-15).
"""

from __future__ import annotations

import re

from hydra.plugins.completion_plugin import DefaultCompletionPlugin

from src.composer import ROOT
from src.mesh_spec import parse
from src.overrides import Groups
from src.trainer.backends.registry import BACKENDS
from src.trainer.parallel.layout import AXES

SEPARATORS = {"bash": " ", "zsh": " ", "fish": "\n"}
"""Shell → what stands between two candidates in the answer to its query."""
SIZES = (2, 4, 8, 16)
"""Sizes of an axis that are offered; any other may be typed."""
AXES_OFFERED = BACKENDS["native"].axes
"""Axes that a mesh can have today, in design order."""

_TAIL = re.compile(r"[a-z]*[0-9]*$")


class Completion(DefaultCompletionPlugin):
    """Hydra's completion with groups as `train.py` knows them."""

    def answer(self, line: str) -> list[str]:
        """Candidates for the last word of a command line, `python train.py` included."""
        return self._query(ROOT, self.strip_python_or_app_name(line) if line else "")

    def _query_config_groups(
        self, word: str, config_name: str | None, words: list[str]
    ) -> tuple[list[str], bool]:
        """Options of a group for `group=`, each value of a sweep; else groups as Hydra finds them.

        The second value says that the word can be nothing else than an option.
        """
        groups = Groups(self.config_loader)
        group, equals, typed = word.partition("=")
        if not equals:
            names = [f"{name}=" for name in groups.names if name.startswith(word)]
            hydra, _ = super()._query_config_groups(word, config_name, words)
            return names + [name for name in hydra if name.startswith("hydra")], False
        if group not in groups.names:
            return super()._query_config_groups(word, config_name, words)
        before, comma, last = typed.rpartition(",")
        known = groups.options(group) + (specs(last) if group == "mesh" else [])
        return [f"{group}={before}{comma}{name}" for name in known if name.startswith(last)], True


def specs(typed: str) -> list[str]:
    """Mesh specs that begin with `typed`: itself if it is one, and those with one more axis after it."""
    tail = _TAIL.search(typed)
    assert tail is not None
    stems = {typed, typed[: tail.start()]}
    found = {typed} if _is_spec_or_empty(typed) and typed else set()
    for stem in filter(_is_spec_or_empty, stems):
        used = parse(stem) if stem else {}
        last = max((AXES.index(axis) for axis in used), default=-1)
        later = [axis for axis in AXES_OFFERED if AXES.index(axis) > last]
        found |= {f"{stem}{axis}{size}" for axis in later for size in SIZES}
    return sorted((spec for spec in found if spec.startswith(typed)), key=_order)


def _is_spec_or_empty(text: str) -> bool:
    try:
        return not text or bool(parse(text))
    except ValueError:
        return False


def _order(spec: str) -> list[tuple[int, int]]:
    """Design order, then size."""
    return [(AXES.index(axis), size) for axis, size in parse(spec).items()]
