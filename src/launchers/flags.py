"""What is asked of sbatch, each flag with its origin: pure functions of the config (FLAG, SLURM-1)."""

from __future__ import annotations

import math
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
"""Flags that `launcher.extra` may not set, and what decides instead."""
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

    def __str__(self) -> str:
        return f"--{self.name}" if self.value == "true" else f"--{self.name}={self.value}"


def sbatch_flags(
    config: Config, overrides: Sequence[str], where: Spread, platform: str, name: str
) -> list[Flag]:
    """What Slurm's sbatch is asked for, see `asked`; raises UserError (2) where `launcher.extra` may not."""
    flags = asked(config, overrides, where, platform, name)
    if is_signalled(config):
        grace = durations.seconds(config.launcher.grace)
        flags += [Flag("signal", f"USR2@{grace}", "derived: launcher.grace before the time limit")]
    flags, problems = with_extra(flags, config.launcher.extra, overrides, OURS)
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


def with_extra(
    flags: Sequence[Flag], extra: Mapping[str, str], overrides: Sequence[str], ours: Mapping[str, str]
) -> tuple[list[Flag], list[Problem]]:
    """The flags and those of `launcher.extra`: the last layer decides, and a flag stands once.

    Also a problem for each flag that only we may set; `ours` says what decides it.
    """
    merged = {flag.name: flag for flag in flags}
    problems = []
    for key, value in extra.items():
        name = long_name(key)
        if name in ours:
            message = f"--{name}={value} is decided elsewhere: {ours[name]}"
            problems.append(Problem(f"launcher.extra.{key}", message, "leave it out of extra", "FLAG"))
        merged[name] = Flag(name, value, _from(f"extra.{key}", value, overrides))
    return list(merged.values()), problems


def long_name(key: str) -> str:
    """`p`, `-p`, `--partition` and `partition` are one flag; `_` stands for `-`."""
    bare = key.lstrip("-")
    return SHORT.get(bare, bare.replace("_", "-"))


def _from(key: str, value: object, overrides: Sequence[str], derived: str = "") -> str:
    """`command line`, or a file; `derived` where the key was left alone."""
    if value is None:
        return derived
    typed = any(text.lstrip("+").startswith(f"launcher.{key}=") for text in overrides)
    return f"launcher.{key} ({'command line' if typed else 'site file or group'})"
