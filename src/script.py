"""Values of a script itself, typed like overrides beside those of the config (CFG-20)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser

from src.errors import Problem
from src.fields import Schema, leaves_of, schema_of
from src.models.schema import FAMILIES
from src.overrides import check_value, parse
from src.tree import cast, raise_all

Values = TypeVar("Values")

PREFIX = "script."


def script_values(cls: type[Values], typed: Sequence[str]) -> tuple[Values, list[str]]:
    """What `typed` sets in the dataclass `cls`, and the overrides that are left for the config.

    A value is `script.NAME=…`; the prefix may be left out where the config has no such key.

    Raises:
        UserError: unknown names and wrong types, all at once, as for the config.
    """
    known = Schema({f"{PREFIX}{name}": leaf for name, leaf in leaves_of(cls).items()}, frozenset())
    parser = OverridesParser.create()
    values: dict[str, Any] = {}
    rest: list[str] = []
    problems: list[Problem] = []
    for line in typed:
        full = _with_prefix(line, known)
        if full is None:
            rest.append(line)
            continue
        items, wrong = parse(full, parser)
        wrong += [problem for item in items for problem in check_value(item, known, multirun=False)]
        problems += wrong
        if not wrong:
            values |= {
                item.key.removeprefix(PREFIX): cast(item.override.value(), known.leaves[item.key])
                for item in items
            }
    raise_all(problems)
    return cls(**values), rest


def _with_prefix(line: str, known: Schema) -> str | None:
    """The line as `script.NAME=…`; None if it is the config's."""
    key = line.partition("=")[0]
    if key.lstrip("+~").startswith(PREFIX):
        return line
    config = schema_of(next(iter(FAMILIES)))
    is_ours = f"{PREFIX}{key}" in known.leaves and key not in config.leaves and key not in config.sections
    return f"{PREFIX}{line}" if is_ours else None
