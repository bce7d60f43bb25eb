"""Config files as they are written: keys with line numbers, values with their text (CFG-1, CFG-4, CFG-11)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader

from src.errors import Problem, UserError
from src.fields import Schema, unknown
from src.values import Given, Scalar, check

SITE_GROUPS = ("launcher", "paths", "platform", "logger", "env", "container")
"""What a site file may set (CFG-11)."""

_DECORATION = re.compile(r"^((optional|override) +)*/?")


def site_directory() -> Path:
    """`$XDG_CONFIG_HOME/manyhead`, whose `site/default.yaml` is this machine's own (CFG-11)."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "manyhead"


@dataclass(frozen=True)
class Source:
    """A YAML file and where its content lands."""

    path: Path
    package: str
    """Dotted prefix of its keys; empty at the root."""
    is_site: bool = False


def check_file(source: Source, known: Schema) -> list[Problem]:
    """Every unknown key, every value of a wrong type and every forbidden expression of one file."""
    return [problem for given in read(source, known) for problem in _check(given, source, known)]


def _check(given: Given, source: Source, known: Schema) -> list[Problem]:
    name = given.key.removeprefix(f"{source.package}.") if source.package else given.key
    if name == "defaults":
        return _check_site_defaults(given) if source.is_site else []
    if source.is_site and name.partition(".")[0] not in SITE_GROUPS:
        return [_not_for_a_site(name, given)]
    if name == "hydra":
        return []
    leaf = known.leaf(given.key)
    return [unknown(given.key, given.origin, known)] if leaf is None else check(given, leaf)


def _check_site_defaults(given: Given) -> list[Problem]:
    """Entries such as `override /launcher: local`: of the groups that a site may choose."""
    entries = [item.value for item in given.value if isinstance(item.value, dict)]
    groups = [_DECORATION.sub("", name).partition("@")[0] for entry in entries for name in entry]
    return [_not_for_a_site(group, given) for group in groups if group not in SITE_GROUPS]


def _not_for_a_site(key: str, given: Given) -> Problem:
    fix = f"a site file sets {', '.join(SITE_GROUPS)} and nothing else"
    return Problem(key, f"set by the site file {given.origin}", fix, "CFG-11")


def read(source: Source, known: Schema) -> Iterator[Given]:
    """The keys of a file; sections are opened, lists and free mappings stay whole.

    Raises `UserError` if the file is no YAML mapping.
    """
    loader = get_yaml_loader()(source.path.read_text(encoding="utf-8"))
    try:
        root = loader.get_single_node()
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise UserError([Problem(str(source.path), "is no YAML mapping")])
        yield from _walk(loader, root, source, source.package, known)
    except yaml.YAMLError as error:
        raise UserError([Problem(str(source.path), f"is no YAML: {error}")]) from error
    finally:
        loader.dispose()


def _walk(loader: Any, node: Any, source: Source, prefix: str, known: Schema) -> Iterator[Given]:
    for name_node, value in node.value if node is not None else []:
        name = str(name_node.value)
        key = f"{prefix}.{name}" if prefix else name
        if key in known.sections and isinstance(value, yaml.MappingNode):
            yield from _walk(loader, value, source, key, known)
        else:
            origin = f"{source.path}:{name_node.start_mark.line + 1}"
            yield Given(key, _value(loader, value), _text(value), origin)


def _value(loader: Any, node: Any) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return [_item(loader, item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {str(name.value): _item(loader, item) for name, item in node.value}
    return loader.construct_object(node, deep=True)


def _item(loader: Any, node: Any) -> Scalar:
    return Scalar(_value(loader, node), _text(node))


def _text(node: Any) -> str | None:
    """The scalar as written; None for a quoted one, whose text is its value, and for lists and mappings."""
    return node.value if isinstance(node, yaml.ScalarNode) and node.style is None else None
