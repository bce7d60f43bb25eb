"""What is asked of sbatch, each flag with its origin: pure functions of the config (FLAG, SLURM-1)."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from src import durations
from src.config import Config
from src.errors import Problem, UserError
from src.launchers.spread import Spread

SHORT = {
    "A": "account",
    "C": "constraint",
    "D": "chdir",
    "G": "gpus",
    "J": "job-name",
    "N": "nodes",
    "a": "array",
    "c": "cpus-per-task",
    "d": "dependency",
    "e": "error",
    "n": "ntasks",
    "o": "output",
    "p": "partition",
    "q": "qos",
    "t": "time",
    "w": "nodelist",
    "x": "exclude",
}
"""Letters of sbatch and their long names."""
OURS = {
    "array": "sweep with -m",
    "cpus-per-task": "launcher.cpus_per_task",
    "error": "the logs' place is fixed",
    "export": "jobs get the environment of the command",
    "gpus": "launcher.gpus_per_node",
    "gpus-per-node": "launcher.gpus_per_node",
    "gpus-per-task": "launcher.gpus_per_node",
    "nodes": "launcher.nodes",
    "ntasks": "launcher.nodes",
    "ntasks-per-node": "one task a node starts its ranks",
    "open-mode": "attempts append to one log",
    "output": "the logs' place is fixed",
    "signal": "launcher.grace",
    "wrap": "the script is ours",
}
"""Flags that `launcher.extra` and `launcher.flags` may not set, and what decides instead."""
TYPED = "command line"
"""Origin of what was typed."""
BARE = (
    "contiguous",
    "exclusive",
    "get-user-env",
    "hold",
    "nice",
    "no-kill",
    "no-requeue",
    "overcommit",
    "oversubscribe",
    "propagate",
    "quiet",
    "reboot",
    "requeue",
    "spread-job",
    "use-min-nodes",
    "verbose",
)
"""Flags whose value, if they have one, stands behind `=` only: the next word is not theirs."""
KEYS = ("partition", "account", "qos", "constraint", "exclude")
"""Keys of the launcher that are flags of the same name."""


@dataclass(frozen=True)
class Flag:
    """One flag of sbatch."""

    name: str
    """Long name without dashes."""
    value: str
    """`true` for a flag without a value."""
    origin: str

    @property
    def is_typed(self) -> bool:
        """Whether it comes from the command line."""
        return f"({TYPED})" in self.origin

    def __str__(self) -> str:
        return f"--{self.name}" if self.value == "true" else f"--{self.name}={self.value}"


def sbatch_flags(
    config: Config, overrides: Sequence[str], where: Spread, platform: str, name: str
) -> list[Flag]:
    """What Slurm's sbatch is asked for, see `asked`; raises UserError (2) where others may not."""
    flags = asked(config, overrides, where, platform, name)
    if is_signalled(config):
        grace = durations.seconds(config.launcher.grace)
        flags += [Flag("signal", f"USR2@{grace}", "derived: launcher.grace before the time limit")]
    flags, problems = with_extra(flags, extra_words(config), overrides, OURS)
    if problems:
        raise UserError(problems)
    return flags


def asked(config: Config, overrides: Sequence[str], where: Spread, platform: str, name: str) -> list[Flag]:
    """The flags of the launcher's keys in a stable order.

    Args:
        config: the job's.
        overrides: of the command line, by which an origin is told.
        where: nodes and ranks per node.
        platform: `cpu` asks for no GPU.
        name: of the job.
    """
    launcher = config.launcher
    flags = [
        Flag("job-name", name, "derived: the run's name"),
        Flag("nodes", str(where.nodes), _from("nodes", launcher.nodes, overrides, "derived: ranks / node")),
        Flag("ntasks-per-node", "1", "derived: one task a node, which starts its ranks"),
        Flag(
            "cpus-per-task",
            str(launcher.cpus_per_task or where.ranks),
            _from("cpus_per_task", launcher.cpus_per_task, overrides, "derived: a core for each rank"),
        ),
    ]
    if platform != "cpu":
        flags += [Flag("gpus-per-node", str(where.ranks), "derived: a GPU for each rank of a node")]
    if launcher.time is not None:
        minutes = math.ceil(durations.seconds(launcher.time) / 60)
        flags += [Flag("time", str(minutes), _from("time", launcher.time, overrides) + ", in whole minutes")]
    for key in KEYS:
        value = getattr(launcher, key)
        if value is not None:
            flags += [Flag(key, value, _from(key, value, overrides))]
    return flags


def is_signalled(config: Config) -> bool:
    """Whether the scheduler announces the time limit.

    Its signal may reach every process of a step, and ends the monitor of a podman container (tried with
    conmon 2.1.6: the container then stops without a save); there the agent looks at the clock itself.
    """
    return config.container.name != "podman"


def extra_words(config: Config) -> list[tuple[str, str, str]]:
    """Flags that were asked for by their own names: key below `launcher`, long name, value; the last decides.

    Raises:
        UserError: `launcher.flags` cannot be read (2).
    """
    launcher = config.launcher
    extra = [(f"extra.{key}", long_name(key), value) for key, value in launcher.extra.items()]
    return extra + [("flags", name, value) for name, value in parse_words(launcher.flags).items()]


def with_extra(
    flags: Sequence[Flag],
    extra: Sequence[tuple[str, str, str]],
    overrides: Sequence[str],
    ours: Mapping[str, str],
) -> tuple[list[Flag], list[Problem]]:
    """Each flag once: what was typed goes before what a file says, and the last before the first.

    Also a problem for each flag that only we may set and that says something else; `ours` says what decides
    it, `extra` is what `extra_words` found.
    """
    merged = {flag.name: flag for flag in flags}
    problems = []
    for key, name, value in extra:
        before, flag = merged.get(name), Flag(name, value, _from(key, value, overrides))
        if name in ours and (before is None or before.value != value):
            other = f", {before} ({before.origin}) contradicts it" if before is not None else ""
            message = f"{flag} is decided elsewhere: {ours[name]}{other}"
            problems.append(Problem(f"launcher.{key}", message, "leave it out", "FLAG"))
        if before is None or not before.is_typed or flag.is_typed:
            merged[name] = flag
    return list(merged.values()), problems


def parse_words(text: str) -> dict[str, str]:
    """Flags by long name: `-N 2`, `-N2`, `--nodes 2` and `--nodes=2` are one, the last of a name decides.

    Letters are not split where several stand together, `--` ends, `true` is the value of a bare flag.

    Raises:
        UserError: a word that is no flag, a letter that is not in the table, or an open quotation mark (2).
    """
    found: dict[str, str] = {}
    try:
        rest = shlex.split(text)
    except ValueError as error:
        problem = Problem("launcher.flags", f"{text!r}: {error}", "close the quotation mark", "FLAG")
        raise UserError([problem]) from error
    while rest and (word := rest.pop(0)) != "--":
        name, equals, value = word[2:].partition("=")
        if not word.startswith("--"):
            name, equals, value = SHORT.get(word[1:2], ""), word[2:], word[2:]
        if not word.startswith("-") or not name:
            fix = "write its long form, --NAME=VALUE"
            raise UserError([Problem("launcher.flags", f"{word!r} is no flag of sbatch", fix, "FLAG")])
        if not equals and name not in BARE and rest and not rest[0].startswith("-"):
            equals = value = rest.pop(0)
        found.pop(name, None)
        found[name] = value if equals else "true"
    return found


def long_name(key: str) -> str:
    """`p`, `-p`, `--partition` and `partition` are one flag; `_` stands for `-`."""
    bare = key.lstrip("-")
    return SHORT.get(bare, bare.replace("_", "-"))


def _from(key: str, value: object, overrides: Sequence[str], derived: str = "") -> str:
    """`command line`, or a file; `derived` where the key was left alone."""
    if value is None:
        return derived
    typed = any(text.lstrip("+").startswith(f"launcher.{key}=") for text in overrides)
    return f"launcher.{key} ({TYPED if typed else 'site file or group'})"
