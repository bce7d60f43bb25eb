"""Between plain trees and `Config`: `config.yaml` and composed configs (CFG-1 to CFG-7, CFG-14)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from src.conf_files import Source, check_file
from src.config import Config
from src.digest import config_digest, identity
from src.errors import Problem, UserError
from src.fields import Leaf, Schema, hints_of, schema_of, unknown
from src.mesh_spec import canonical
from src.models.schema import FAMILIES
from src.trainer.parallel.layout import AXES
from src.values import Given, check


def typed(cfg: DictConfig) -> Config:
    """The dataclass of a composed tree; every unknown, missing or ill-typed key is reported (CFG-1 to 7)."""
    root = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    missing = sorted(OmegaConf.missing_keys(root))
    raise_all([_unset(str(key)) for key in missing])
    try:
        tree = OmegaConf.to_container(root, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(
            [Problem(str(error.full_key or ""), str(error).splitlines()[0], rule="CFG-13")]
        ) from error
    assert isinstance(tree, dict)
    return _from_tree({str(key): value for key, value in tree.items()}, is_whole=True)


def load_config(path: Path) -> Config:
    """Read a `config.yaml`, the only way there is (CFG-14); raises `UserError` with every problem."""
    try:
        node = OmegaConf.load(path)
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError([Problem(str(path), f"cannot be read: {error}")]) from error
    if not isinstance(node, DictConfig):
        raise UserError([Problem(str(path), "is no mapping")])
    tree = {str(key): value for key, value in OmegaConf.to_container(node, resolve=True).items()}  # type: ignore[union-attr]
    raise_all(check_file(Source(path, ""), schema_of(_family(tree))))
    return _from_tree(tree, is_whole=False)


def dump_config(config: Config) -> str:
    """Text of `config.yaml`: every key resolved, both digests in its first lines (CFG-15)."""
    head = f"# config_digest: {config_digest(config)}\n# identity: {identity(config)}\n"
    return head + OmegaConf.to_yaml(OmegaConf.create(asdict(config)))


def raise_all(problems: Sequence[Problem]) -> None:
    """Raise `UserError` with the problems, if there are any."""
    if problems:
        raise UserError(problems)


def _unset(key: str) -> Problem:
    group = key.partition(".")[0]
    return Problem(key, "has no value", f"choose a {group}={group.upper()}, or type {key}=VALUE", "CFG-7")


def _family(tree: Mapping[str, Any]) -> str:
    model = tree.get("model")
    name = model.get("family") if isinstance(model, dict) else None
    if name not in FAMILIES:
        raise UserError([Problem("model.family", f"{name!r} is none of {', '.join(FAMILIES)}", rule="CFG-9")])
    return str(name)


def _from_tree(tree: dict[str, Any], is_whole: bool) -> Config:
    family = _family(tree)
    known = schema_of(family)
    leaves = dict(_leaves("", tree, known))
    problems = [problem for key, value in leaves.items() for problem in _check_leaf(key, value, known)]
    if is_whole:
        gone = sorted(set(known.leaves) - set(leaves))
        problems += [Problem(key, "was deleted; a key of the schema cannot be", rule="HYD-2") for key in gone]
    raise_all(problems)
    config: Config = _build(Config, "", tree, known, family)
    if config.mesh.spec != "auto":
        config.mesh.spec = canonical({axis: getattr(config.mesh, axis) for axis in AXES})
    return config


def _leaves(prefix: str, tree: Mapping[str, Any], known: Schema) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in known.sections and isinstance(value, dict):
            yield from _leaves(f"{key}.", value, known)
        else:
            yield key, value


def _check_leaf(key: str, value: Any, known: Schema) -> list[Problem]:
    leaf = known.leaves.get(key)
    if leaf is None:
        return [unknown(key, "a config", known)]
    return check(Given(key, value, None, ""), leaf)


def _build(cls: Any, prefix: str, tree: Mapping[str, Any], known: Schema, family: str) -> Any:
    """An instance of `cls`; keys that the tree lacks keep their default."""
    values = {}
    hints = hints_of(cls)
    for item in fields(cls):
        if item.name not in tree:
            continue
        key, value = prefix + item.name, tree[item.name]
        hint = FAMILIES[family] if key == "model" else hints[item.name]
        inner = is_dataclass(hint)
        values[item.name] = (
            _build(hint, f"{key}.", value, known, family) if inner else cast(value, known.leaves[key])
        )
    return cls(**values)


def cast(value: Any, leaf: Leaf) -> Any:
    """A checked value in the type of its key: 1 becomes 1.0 where a number is wanted."""
    if value is None:
        return None
    if leaf.container is list:
        return [leaf.kind(item) for item in value]
    if leaf.container is dict:
        return {str(name): leaf.kind(item) for name, item in value.items()}
    return leaf.kind(value)
