"""The command line's overrides, each checked for all that can be wrong with it (CFG-1 to CFG-6, HYD)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, QuotedString, RangeSweep, Sweep
from hydra.errors import HydraException

from src import reserved
from src.errors import Problem
from src.fields import Leaf, Schema, edit_distance, unknown
from src.mesh_spec import GRAMMAR
from src.values import COMMAND_LINE, Given, Scalar, check


@dataclass(frozen=True)
class Typed:
    """One override: as typed, and as Hydra parses it."""

    line: str
    override: Override

    @property
    def key(self) -> str:
        """Config key or group, without `+`, `++`, `~` and package."""
        return str(self.override.key_or_group)

    @property
    def text(self) -> str:
        """What stands behind the equals sign."""
        return self.line.partition("=")[2]

    @property
    def is_hydra(self) -> bool:
        """Whether it configures Hydra itself, which knows its own keys."""
        return bool(self.override.is_hydra_override())


def parse(line: str, parser: OverridesParser) -> tuple[list[Typed], list[Problem]]:
    """An override that Hydra's grammar takes, or else a problem with the quoted form (HYD-8)."""
    try:
        return [Typed(line, override) for override in parser.parse_overrides([line])], []
    except HydraException:
        return [], [_unparsed(line)]


def _unparsed(line: str) -> Problem:
    key, equals, text = line.partition("=")
    if not equals:
        return Problem(line, "is no override", f"type {line}=VALUE, or --help for what there is", "HYD-8")
    text = text.replace('"', '\\"')
    return Problem(key, f"Hydra's grammar does not take {line}", f"""type '{key}="{text}"'""", "HYD-8")


class Groups:
    """The config groups and their options, across all of Hydra's sources."""

    def __init__(self, loader: ConfigLoader) -> None:
        self.loader = loader
        self.names = [name for name in loader.list_groups("") if name not in ("hydra", "schema", "site")]

    def options(self, group: str) -> list[str]:
        """Options that files define, sizes of a family included; mesh specs are beyond counting."""
        options = [*self._files(group)]
        for folder in self.loader.get_group_options(group, ObjectType.GROUP):
            options += [f"{folder}/{size}" for size in self._files(f"{group}/{folder}")]
        return sorted(set(options))

    def has(self, group: str, option: str) -> bool:
        """Whether some source has the option; asks also for names that no listing shows."""
        return any(source.is_config(f"{group}/{option}") for source in self.loader.get_sources())

    def _files(self, group: str) -> list[str]:
        return list(self.loader.get_group_options(group, ObjectType.CONFIG))


def check_groups(typed: Sequence[Typed], groups: Groups, multirun: bool) -> tuple[list[str], list[Problem]]:
    """The choices of a group that can be composed, as overrides, and what is wrong with the others."""
    good, problems = [], []
    for item in typed:
        wrong = _check_choice(item, groups, multirun)
        problems += wrong
        if not wrong and not isinstance(item.override._value, Sweep):
            good.append(item.line)
    return good, problems


def _check_choice(item: Typed, groups: Groups, multirun: bool) -> list[Problem]:
    if item.key not in groups.names:
        return [_unknown_group(item, groups)]
    if item.override.is_delete():
        return [Problem(item.key, "a group cannot be deleted", "choose another of its options", "HYD-2")]
    if item.override.is_add() or item.override.is_force_add():
        return [
            Problem(item.key, "every group has a choice already", f"type {item.key}={item.text}", "HYD-1")
        ]
    if isinstance(item.override._value, Sweep) and not multirun:
        return [_ambiguous(item, f"-m {item.line}")]
    options = [str(value) for value in _values(item.override) if not isinstance(value, Glob)]
    return [problem for option in options for problem in _check_option(item.key, option, groups)]


def _check_option(group: str, option: str, groups: Groups) -> list[Problem]:
    if groups.has(group, option) or (group == "experiment" and option == "None"):
        return []
    refused = reserved.refusal(group, option, groups.options(group))
    if refused is not None:
        return [refused]
    if group == "mesh":
        return [Problem(group, f"{option!r} is no mesh", GRAMMAR, "CFG-8")]
    existing = groups.options(group)
    best = min(existing, key=lambda name: edit_distance(option, name), default="")
    near = f"did you mean {group}={best}? " if best and edit_distance(option, best) <= 2 else ""
    return [Problem(group, f"has no option {option}", f"{near}what exists: {', '.join(existing)}", "CFG-6")]


def _unknown_group(item: Typed, groups: Groups) -> Problem:
    best = min(groups.names, key=lambda name: edit_distance(item.key, name))
    return Problem(item.key, f"unknown group, set by {COMMAND_LINE}", f"did you mean {best}?", "CFG-1")


def is_choice(item: Typed, groups: Groups) -> bool:
    """Whether the override chooses an option of a group rather than setting a key."""
    return item.key in groups.names or "/" in item.key or item.override.package is not None


def check_value(item: Typed, known: Schema, multirun: bool) -> list[Problem]:
    """Everything wrong with an override of a key."""
    leaf = known.leaf(item.key)
    if leaf is None:
        return [_not_a_leaf(item, known)]
    wrong = _check_form(item, known) or ([] if multirun else _check_sweep(item, leaf))
    if wrong:
        return wrong
    plus = item.line[: len(item.line) - len(item.line.lstrip("+"))]
    givens = (Given(item.key, value, text, COMMAND_LINE, plus) for value, text in _typed_values(item))
    return [problem for given in givens for problem in check(given, leaf)]


def _not_a_leaf(item: Typed, known: Schema) -> Problem:
    if item.key in known.sections:
        fix = f"set its keys, such as {item.key}.NAME={item.text or 'VALUE'}"
        return Problem(item.key, "is a section, not a single key", fix, "CFG-1")
    return unknown(item.key, COMMAND_LINE, known)


def _check_form(item: Typed, known: Schema) -> list[Problem]:
    """Deletions and additions, and keys that another override sets."""
    is_free = item.key not in known.leaves
    if item.key == "mesh.spec":
        return [Problem(item.key, "is derived from the sizes", f"type mesh={item.text}", "CFG-8")]
    if item.override.is_delete():
        return (
            []
            if is_free
            else [Problem(item.key, "a key of the schema cannot be deleted", "leave it out", "HYD-2")]
        )
    if is_free and not (item.override.is_add() or item.override.is_force_add()):
        return [Problem(item.key, "a new name is set with +", f"type +{item.line}", "CFG-1")]
    if not is_free and item.override.is_add():
        return [
            Problem(item.key, "is there already, + adds nothing", f"type {item.key}={item.text}", "HYD-1")
        ]
    return []


def _check_sweep(item: Typed, leaf: Leaf) -> list[Problem]:
    if not isinstance(item.override._value, Sweep):
        return []
    text = f"""'{item.key}="{item.text}"' for text, """ if leaf.kind is str and leaf.container is None else ""
    items = f"'{item.key}=[{item.text}]' for a list, " if leaf.container is list else ""
    return [_ambiguous(item, f"{text}{items}-m {item.line} for a sweep")]


def _ambiguous(item: Typed, fix: str) -> Problem:
    return Problem(item.key, f"{item.text} is several values", f"type {fix}", "HYD-7")


def _values(override: Override) -> list[Any]:
    """The value, or each value of a sweep, with quotes kept apart."""
    value = override._value
    if isinstance(value, ChoiceSweep):
        return list(value.list)
    if isinstance(value, RangeSweep):
        return list(value.range())
    return [] if isinstance(value, Sweep) else [value]


def _typed_values(item: Typed) -> list[tuple[Any, str | None]]:
    values = _values(item.override)
    texts: list[str | None] = [item.text] if len(values) == 1 else list(item.text.split(","))
    if len(texts) != len(values):
        texts = [None] * len(values)
    return [_plain(value, text, item.text) for value, text in zip(values, texts, strict=True)]


def _plain(value: Any, text: str | None, line: str) -> tuple[Any, str | None]:
    """Python value and text; a quoted string is its own text, items of a list are looked up in the line."""
    if isinstance(value, QuotedString):
        return value.text, None
    if isinstance(value, list):
        return [_scalar(item, line) for item in value], None
    if isinstance(value, dict):
        return {str(name): _scalar(item, line) for name, item in value.items()}, None
    return value, text


def _scalar(value: Any, line: str) -> Scalar:
    if isinstance(value, QuotedString):
        return Scalar(value.text, None)
    return Scalar(value, str(value) if str(value) in line else line.strip("[]"))
