"""Whether a directory can be gone on with: its code, its data and which keys may differ (RUN-8, RUN-9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.code_identity import CodeRecord, code_differences
from src.compose import load_config
from src.config import Config
from src.digest import NOT_IDENTITY, flatten, identity
from src.errors import UserError
from src.records import read_json
from src.status import is_finished

MAY_DIFFER = [
    "mesh",
    "pipeline",
    "recompute",
    "kernels",
    "backend",
    "launcher",
    "platform",
    "logger",
    "paths",
    "profile",
    "evaluation",
    "checkpoint",
    "sweep",
    "env",
    "container",
    "debug",
    "spike",
    "determinism",
    "max_steps",
    "lr_schedule",
    "micro_batch_size",
    "optimizer",
    "precision.first_moment",
    "precision.fp8",
    "precision.fp8_recipe",
    "data.prefetch",
    "data.prepare",
    "data.allow_change",
    "run_name",
    "resume",
    "dry_run",
]
"""Keys, and groups with all that is below them, that a resume may change; the new config wins."""
MAY_NOT_DIFFER = ("optimizer.kind",)
"""Exceptions below the groups above."""
EXCHANGEABLE = {"precision.name": ("master", "split")}
"""Keys that a resume may change from one of these values to another: they save the same state."""


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
        fits = may_differ(key, allow_change) or all(value in EXCHANGEABLE.get(key, ()) for value in shown)
        (allowed if fits else refused).append(Difference(key, *shown))
    return allowed, refused


def kept_file(run: Path, name: str) -> Path | None:
    """`RUN/<name>`, else the newest under `attempts/`, which a kill between moving and writing leaves."""
    found = [run / name, *sorted((run / "attempts").glob(f"*/{name}"), reverse=True)]
    return next((path for path in found if path.is_file()), None)


def other_origin(run: Path, config: Config, code: CodeRecord, data_key: str | None) -> list[str]:
    """Why the directory is of other code or data than this command's (RUN-8); empty if not, or if new."""
    if kept_file(run, "config.yaml") is None:
        return []
    path = kept_file(run, "code.json")
    old = (read_json(path) if path else None) or {}
    reasons = []
    if old.get("code_identity") != code.code_identity and config.resume != "allow_code":
        names = code_differences(old, code.json())
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        reasons.append(f"other code ({shown or 'unknown'})")
    if old.get("data_key") != data_key and not config.data.allow_change:
        reasons.append(f"other data (key {short(old.get('data_key'))}, now {short(data_key)})")
    if not reasons and config.run_name is None:
        reasons += other_config(run, config)
    return reasons


def other_config(run: Path, config: Config) -> list[str]:
    """A derived name can meet another config, for a sweep's says only what is swept."""
    path = kept_file(run, "config.yaml")
    assert path is not None
    old = load_config(path)
    if identity(old) == identity(config):
        return []
    before, now = flatten(old), flatten(config)
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    changed = [key for key in changed if key.split(".")[0] not in NOT_IDENTITY]
    return [f"another config ({', '.join(changed[:4])})"]


def short(key: str | None) -> str:
    """The first characters of a digest."""
    return key[:12] if key else "none"


def refusal(run: Path, reasons: list[str], config: Config) -> str:
    """Why an explicitly named directory cannot be gone on with, and what to type."""
    return (
        f"{run} has {'; '.join(reasons)}; type run_name={config.run_name}-2 to start another run, "
        "or resume=allow_code to go on with the edited code (data.allow_change=true with other data)"
    )


def resume_notes(run: Path, config: Config, code: CodeRecord) -> list[str]:
    """A line for each key that a resume changes; exit 8 with a diff if one may not change (RUN-9)."""
    path = kept_file(run, "config.yaml")
    if path is None:
        return []
    allowed, refused = differences(flatten(load_config(path)), flatten(config))
    if refused:
        raise UserError(diff_text(run, refused), code=8)
    if config.resume == "none" and not is_finished(run, config):
        text = f"{run} is unfinished and resume=none refuses to go on; type run_name=NAME for another run"
        raise UserError(text, code=8)
    notes = [f"goes on with {difference}" for difference in allowed if telling(difference)]
    old = read_json(kept_file(run, "code.json") or Path()) or {}
    if old.get("code_identity") != code.code_identity:
        notes.append(
            f"goes on with edited code: {', '.join(code_differences(old, code.json())) or 'unknown'}"
        )
    return notes


def telling(difference: Difference) -> bool:
    """Whether a changed key is worth a line: names and paths of the directory itself are not."""
    return not difference.key.startswith(("paths.", "sweep.", "run_name", "resume"))


def diff_text(run: Path, refused: list[Difference]) -> str:
    """The refusal of a resume, key by key."""
    lines = "\n".join(f"  {difference}" for difference in refused)
    return (
        f"{run} holds a run with other values of keys that a resume may not change [RUN-9]:\n{lines}\n"
        "  set them back, or start another run with another run_name="
    )
