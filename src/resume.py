"""Which keys may differ when a run goes on in its directory, and which make it another run (RUN-9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAY_DIFFER = ["mesh", "pipeline", "recompute", "kernels", "backend", "launcher", "platform", "logger", "paths", "profile", "evaluation", "checkpoint", "sweep", "env", "container", "debug", "determinism", "max_steps", "lr_schedule", "micro_batch_size", "optimizer", "data.prefetch", "data.prepare", "data.allow_change", "run_name", "resume", "dry_run"]
"""Keys, and groups with all that is below them, that a resume may change; the new config wins."""
MAY_NOT_DIFFER = ("optimizer.kind",)
"""Exceptions below the groups above."""


@dataclass(frozen=True)
class Difference:
    """One key with the value the directory has and the value asked for."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r}"


def is_below(key: str, group: str) -> bool:
    """Whether dotted `key` is `group` or lies below it."""
    return key == group or key.startswith(group + ".")


def may_differ(key: str, allow_change: bool = False) -> bool:
    """Whether a resume may change `key`; `data.allow_change=true` frees the whole of `data` (PREP-6)."""
    if any(is_below(key, fixed) for fixed in MAY_NOT_DIFFER):
        return False
    if allow_change and is_below(key, "data"):
        return True
    return any(is_below(key, group) for group in MAY_DIFFER)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[Difference], list[Difference]]:
    """What differs between two flat configs (dotted keys), as (allowed, refused), each sorted by key."""
    missing = object()
    allow_change = new.get("data.allow_change") is True
    allowed: list[Difference] = []
    refused: list[Difference] = []
    for key in sorted({*old, *new}):
        before, after = old.get(key, missing), new.get(key, missing)
        if before == after:
            continue
        shown = [None if value is missing else value for value in (before, after)]
        (allowed if may_differ(key, allow_change) else refused).append(Difference(key, *shown))
    return allowed, refused
