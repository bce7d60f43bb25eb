"""The environment of ranks: the table's variables, what wins over them, and where each came from (ENV)."""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from src.code_identity import CHECKOUT
from src.errors import Problem, UserError
from src.launchers.environment_rules import Setting
from src.launchers.environment_table import TABLE, Row

INHERITED = [*(row.name for row in TABLE if row.where == "rank"), "NODE_RANK", "NPROC_PER_NODE"]
"""Taken out before ranks start: an outer launcher's numbers are not this launch's (AGENT-1)."""
SHARED = "MANYHEAD_SHARED"
"""Tells a rank what it must have in common with the ranks of other nodes (ENV-4)."""
KNOWN = ["MANYHEAD_SPLIT_SEED", "MANYHEAD_COMMIT", "MANYHEAD_ATTEMPT", SHARED]
"""Variables of ours; another name that begins so is a typo (ENV-5)."""
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL")
"""In the name of a secret that the table does not know."""


@dataclass(frozen=True)
class Environment:
    """The variables of a rank with the origin of each."""

    values: dict[str, str]
    origins: dict[str, str]

    def json(self) -> dict[str, Any]:
        """What `env.json` holds; the values of secrets are masked."""
        return {
            name: {"value": "***" if is_secret(name) else value, "origin": self.origins[name]}
            for name, value in sorted(self.values.items())
        }

    def public(self) -> dict[str, str]:
        """The values that may be shown."""
        return {name: value for name, value in self.values.items() if not is_secret(name)}

    def of_ranks(self, attempt: int) -> dict[str, str]:
        """What the agent gives to its ranks, with what they hold against those of other nodes (ENV-4)."""
        same = {
            name: value
            for name, value in sorted(self.public().items())
            if any(row.where == "launch" for row in rows_of(name))
        }
        return {**self.values, "MANYHEAD_ATTEMPT": str(attempt), SHARED: json.dumps(same)}

    def apply(self, attempt: int, modules: Mapping[str, object] = sys.modules) -> None:
        """Make it this process's own, before torch is imported, which reads most of it then (ENV-3)."""
        if "torch" in modules:
            raise RuntimeError("the environment is applied before torch is imported")
        os.environ.update(self.of_ranks(attempt))


def is_secret(name: str) -> bool:
    """Whether the value is never printed or written."""
    return any(row.kind == "secret" for row in rows_of(name)) or SECRET.search(name) is not None


def rows_of(name: str) -> list[Row]:
    """The table's rows for a variable, one for each group of platforms."""
    return [row for row in TABLE if row.name == name or is_below(name, row)]


def is_below(name: str, row: Row) -> bool:
    """Whether a row with `*` means `name`."""
    return row.name.endswith("*") and name.startswith(row.name[:-1])


def rank_environment(setting: Setting, shell: Mapping[str, str]) -> Environment:
    """The table's variables for `setting`, and those that the table or `env.NAME` knows by name.

    The shell wins over `env.NAME`, that over determinism, network and platform, in this order (ENV-1).

    Raises:
        UserError: the shell or `env.NAME` contradicts determinism=bitwise (2).
    """
    values: dict[str, str] = {}
    origins: dict[str, str] = {}
    for origin, layer in layers(setting, shell):
        for name, value in layer.items():
            if value is not None:
                refuse_contradiction(setting, name, values.get(name), value, origin, origins.get(name))
                values[name], origins[name] = join_path(name, value), origin
    return Environment(values, origins)


def layers(setting: Setting, shell: Mapping[str, str]) -> Iterator[tuple[str, Mapping[str, str | None]]]:
    """Values by origin, the weakest origin first."""
    rows = [row for row in TABLE if setting.platform in row.platforms and row.where != "rank"]
    for source in ("platform", "network", "determinism"):
        yield source, {row.name: row.rule.value(setting) for row in rows if row.source == source}
    yield "env", setting.config.env
    names = {row.name for row in rows} | set(setting.config.env)
    listed = {name for name in shell if any(is_below(name, row) for row in rows)}
    yield "shell", {name: shell.get(name) for name in sorted(names | listed)}


def join_path(name: str, value: str) -> str:
    """The checkout stays first on the user's own PYTHONPATH."""
    if name != "PYTHONPATH" or value.split(os.pathsep)[0] == str(CHECKOUT):
        return value
    return os.pathsep.join([str(CHECKOUT), value])


def refuse_contradiction(
    setting: Setting, name: str, old: str | None, new: str, origin: str, old_origin: str | None
) -> None:
    """Under determinism=bitwise nothing may undo a determinism row."""
    if old_origin == "determinism" and old != new:
        message = f"{name}={new} ({origin}) contradicts determinism=bitwise, which needs {old}"
        raise UserError([Problem(name, message, f"unset {name}, or type determinism=none", "ENV-1")])


def unknown_names(shell: Mapping[str, str]) -> list[str]:
    """A warning for each MANYHEAD_* variable that means nothing, with the nearest one that does (ENV-5)."""
    warnings = []
    for name in sorted(shell):
        if name.startswith("MANYHEAD_") and name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, 1, 0)
            warnings.append(f"warning: the environment variable {name} is unknown; did you mean {near[0]}?")
    return warnings


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


__all__ = [
    "INHERITED",
    "TABLE",
    "Environment",
    "Setting",
    "cores",
    "rank_environment",
    "unknown_names",
]
