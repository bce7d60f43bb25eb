"""Flat view of a config and its two digests (CFG-15)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

from src.config import Config

NOT_IDENTITY = (
    *(
        "launcher",
        "platform",
        "logger",
        "paths",
        "profile",
        "sweep",
        "checkpoint",
        "env",
        "container",
        "debug",
    ),
    *("run_name", "resume", "dry_run"),
)
"""Top-level keys that do not make another run: where and how, not what."""


def flatten(config: Config) -> dict[str, Any]:
    """Dotted key → value; lists are values, entries of free mappings are keys."""
    return dict(_items("", asdict(config)))


def config_digest(config: Config) -> str:
    """sha256 of everything; ranks compare it."""
    return _sha256(asdict(config))


def identity(config: Config) -> str:
    """sha256 of what makes a run another run; `mesh=auto` enters as `auto`, whatever a machine fills in."""
    tree = {key: value for key, value in asdict(config).items() if key not in NOT_IDENTITY}
    if config.mesh.spec == "auto":
        tree["mesh"] = {axis: size for axis, size in tree["mesh"].items() if axis != "dp"}
    return _sha256(tree)


def _sha256(tree: dict[str, Any]) -> str:
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _items(prefix: str, tree: dict[str, Any]) -> list[tuple[str, Any]]:
    items = []
    for name, value in tree.items():
        items += _items(f"{prefix}{name}.", value) if isinstance(value, dict) else [(prefix + name, value)]
    return items
