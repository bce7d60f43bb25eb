"""The schema as a table of dotted keys, and the key that somebody may have meant (CFG-1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from src.config import Config
from src.errors import Problem
from src.models.schema import FAMILIES


@dataclass(frozen=True)
class Leaf:
    """What one key takes."""

    kind: type
    """`str`, `int`, `float` or `bool`: of the value, or of the items of a list or mapping."""
    container: type | None
    """`list` or `dict`; None for a single value."""
    optional: bool
    """Whether null is a value."""
    choices: tuple[str, ...]
    """The closed set of names; empty takes any."""
    duration: bool
    """Whether the text is a duration."""


@dataclass(frozen=True)
class Schema:
    """All keys of a run with one model family."""

    leaves: Mapping[str, Leaf]
    """Dotted key → what it takes."""
    sections: frozenset[str]
    """Dotted keys that hold other keys."""

    @property
    def free(self) -> list[str]:
        """Mappings whose keys the user invents: `env` and the like."""
        return [key for key, leaf in self.leaves.items() if leaf.container is dict]

    def leaf(self, key: str) -> Leaf | None:
        """What the key takes; an entry of a free mapping takes what the mapping's items are."""
        if key in self.leaves:
            return self.leaves[key]
        parent = next((name for name in self.free if key.startswith(f"{name}.")), None)
        return None if parent is None else Leaf(self.leaves[parent].kind, None, False, (), False)


@cache
def schema_of(family: str) -> Schema:
    """The schema of a run whose model is of this family."""
    leaves: dict[str, Leaf] = {}
    sections: set[str] = set()
    _walk(Config, "", {"model": FAMILIES[family]}, leaves, sections)
    return Schema(leaves, frozenset(sections))


@cache
def hints_of(cls: Any) -> dict[str, Any]:
    """Field → type of a dataclass, with annotations evaluated."""
    return get_type_hints(cls)


def leaves_of(cls: Any) -> dict[str, Leaf]:
    """Field → what it takes, of a dataclass without sections."""
    return {item.name: _leaf(hints_of(cls)[item.name], item.metadata) for item in fields(cls)}


def _walk(cls: type, prefix: str, swap: dict[str, type], leaves: dict[str, Leaf], sections: set[str]) -> None:
    hints = hints_of(cls)
    for item in fields(cls):
        key, hint = prefix + item.name, swap.get(prefix + item.name, hints[item.name])
        if is_dataclass(hint):
            sections.add(key)
            _walk(hint, f"{key}.", swap, leaves, sections)  # type: ignore[arg-type]
        else:
            leaves[key] = _leaf(hint, item.metadata)


def _leaf(hint: Any, metadata: Mapping[str, Any]) -> Leaf:
    optional = get_origin(hint) is UnionType and NoneType in get_args(hint)
    if optional:
        (hint,) = (arg for arg in get_args(hint) if arg is not NoneType)
    container = get_origin(hint) if get_origin(hint) in (list, dict) else None
    kind = get_args(hint)[-1] if container else hint
    return Leaf(kind, container, optional, tuple(metadata.get("choices", ())), bool(metadata.get("duration")))


def nearest(key: str, known: Schema) -> str | None:
    """The valid key most like `key`: the same last part elsewhere, else the smallest edit distance."""
    candidates = [*known.leaves, *known.sections]
    last = key.rpartition(".")[2]
    same = [name for name in candidates if name.rpartition(".")[2] == last]
    if same:
        return min(same, key=lambda name: edit_distance(key, name))
    best = min(candidates, key=lambda name: (_distance(key, name), name))
    return best if _distance(key, best) <= max(2, len(last) // 3) else None


def _distance(key: str, name: str) -> int:
    """Edits between the whole keys, or between their last parts plus one for the other place."""
    return min(edit_distance(key, name), edit_distance(key.rpartition(".")[2], name.rpartition(".")[2]) + 1)


def edit_distance(a: str, b: str) -> int:
    """Insertions, deletions and substitutions that turn `a` into `b` (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        previous, row = row, [i]
        for j, right in enumerate(b, 1):
            row.append(min(previous[j] + 1, row[-1] + 1, previous[j - 1] + (left != right)))
    return row[-1]


RENAMED: dict[str, tuple[str, str]] = {}
"""Former key → its name now and the version that renamed it (CFG-13)."""


def unknown(key: str, origin: str, known: Schema) -> Problem:
    """The problem of a key that the schema does not have."""
    if key in RENAMED:
        name, since = RENAMED[key]
        return Problem(
            key, f"renamed to {name} in version {since}, set by {origin}", f"type {name}", "CFG-13"
        )
    best = nearest(key, known)
    fix = f"did you mean {best}?" if best else "--help lists the groups, docs/options.md every key"
    return Problem(key, f"unknown key, set by {origin}", fix, "CFG-1")
