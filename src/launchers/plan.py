"""What a launch will do, a pure function of config and machine; `dry_run` prints it (PLAN, CFG-17)."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from src.config import SCHEDULERS, Config
from src.digest import config_digest, identity
from src.errors import Problem, UserError
from src.launchers.container import ContainerPlan
from src.launchers.container_command import contain
from src.launchers.environment import Setting, cores, rank_environment
from src.launchers.flags import Flag, sbatch_flags
from src.launchers.memory import RankMemory, precision_name
from src.launchers.network import Network
from src.launchers.rank_plans import RankPlan, rank_plans
from src.launchers.ranks import WORKER, rank_command
from src.launchers.spread import Spread, spread
from src.launchers.spur_capabilities import Capabilities, known
from src.launchers.spur_flags import spur_flags
from src.machine import Machine, find_machine
from src.models import twin
from src.models.counts import count
from src.naming import run_name
from src.trainer.data.keys import Corpora, data_key
from src.trainer.parallel import layout, rules

GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Whether the machine can hold the run, with the arithmetic."""

    fits: bool | None
    """None where the memory of the devices is not known yet."""
    needed: int
    """Bytes of all ranks together on a CPU, of the largest rank on a GPU."""
    available: int | None
    arithmetic: str


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that a launch decides before anything is written or started."""

    run_directory: str
    config_digest: str
    identity: str
    overrides: list[str]
    launcher: str
    platform: str
    devices: int | None
    """GPUs that ranks may take, one each; null on a CPU, and where ranks share them."""
    precision: str
    nodes: int
    ranks_per_node: int
    world: int
    mesh: dict[str, Any]
    ranks: list[RankPlan]
    parameters: dict[str, int]
    """Of the whole model: total, and active per token."""
    match: dict[str, str | int] | None
    """What `model.match` asks for and what the model counts; null without it."""
    batch: dict[str, int]
    """Samples, micro-batches, data ranks, and tokens of a step."""
    data_key: str | None
    """Name of the token artifact; null for synthetic data."""
    data_ready: bool
    """Whether the artifact is in the store."""
    memory: Memory
    force: bool
    """Start even if the memory does not suffice."""
    env: dict[str, str]
    """Variables of a rank, but for secrets and compiler caches, which need a probe."""
    command: str
    """The command of each rank, quoted for a shell."""
    stop: dict[str, str]
    """How long ranks wait for each other, and how long a stopped one may take to save."""
    notices: list[str]
    """What works but is slower than it need be."""
    flags: list[Flag]
    """What is asked of the scheduler, with the origin of each flag; nothing locally."""
    capabilities: str | None = None
    """Which scheduler the flags are for, and where that is known from; null where it does not matter."""
    jobs: int = 1
    """Jobs of a sweep that share the machine with this one, itself included."""
    container: ContainerPlan | None = None
    """What wraps the ranks of each node."""

    def json(self) -> dict[str, Any]:
        """The plan as plain data: `plan.json`, and the last line of a dry run."""
        return {"schema": 1, **asdict(self)}

    def text(self) -> str:
        """The plan for a person."""
        batch = self.batch
        data = self.data_key or "synthetic, nothing to prepare"
        state = "" if self.data_key is None else " (in the store)" if self.data_ready else " (to be prepared)"
        nodes = f", {self.nodes} nodes x {self.ranks_per_node}" if self.nodes > 1 else ""
        lines = [
            ("run", self.run_directory),
            (
                "model",
                f"{self.parameters['total']:,} parameters, {self.parameters['active']:,} active per token",
            ),
            *([("match", twin.words(self.match))] if self.match else []),
            (
                "mesh",
                f"{self.mesh['spec']}: {self.world} rank{'s' * (self.world > 1)} on {self.platform}{nodes}",
            ),
            ("precision", self.precision),
            ("batch", _batch_text(batch)),
            ("data", data + state),
            *[("", line) for line in self._rank_lines()],
            ("memory", self.memory.arithmetic),
            ("fits", {True: "true", False: "false", None: "unprobed"}[self.memory.fits]),
            *[("notice", notice) for notice in self.notices],
            ("each rank", self.command),
            *([("container", self.container.command)] if self.container else []),
        ]
        lines += [
            ("flags" if k == 0 else "", f"{flag}  ({flag.origin})") for k, flag in enumerate(self.flags)
        ]
        lines += [("scheduler", self.capabilities)] if self.capabilities else []
        return "\n".join(f"{name:<10} {line}" for name, line in lines)

    def _rank_lines(self) -> list[str]:
        shown = self.ranks if len(self.ranks) <= MOST_LINES else self.ranks[:MOST_LINES]
        lines = [_rank_text(rank) for rank in shown]
        rest = self.world - sum(rank.count for rank in shown)
        return [*lines, f"and {rest} more ranks, in the JSON below"] if rest else lines


MOST_LINES = 16
"""Ranks that the text lists."""


def make_plan(
    config: Config,
    overrides: Sequence[str],
    machine: Machine | None = None,
    corpora: Corpora | None = None,
    capabilities: Capabilities | None = None,
) -> LaunchPlan:
    """The plan of a resolved and valid config; touches nothing and starts nothing.

    Args:
        config: as `compose` returns it.
        overrides: the command line's, for the record.
        machine: what ranks may take; found here if not given.
        corpora: what other plans of the same command saw of their data; looked at here if not given.
        capabilities: of Spur; read from what an earlier submission kept if not given. Nobody else needs any.

    Raises:
        UserError: the corpus cannot be read (4), or the environment contradicts the config (2).
    """
    machine = machine or find_machine(config)
    key = data_key(config, corpora)
    run = str(Path(config.paths.runs) / run_name(config))
    ranks = rank_plans(config, machine.platform)
    counts = count(config.model)
    share = spread(config, machine.platform)
    if config.launcher.name == "spur":
        capabilities = capabilities or known()
    plan = LaunchPlan(
        run_directory=run,
        config_digest=config_digest(config),
        identity=identity(config),
        overrides=list(overrides),
        launcher=config.launcher.name,
        platform=machine.platform,
        devices=None if machine.platform == "cpu" or config.launcher.share_device else machine.devices,
        precision=precision_name(config, machine.platform),
        nodes=share.nodes,
        ranks_per_node=share.ranks,
        world=config.mesh.world,
        mesh=asdict(config.mesh),
        ranks=ranks,
        parameters={"total": counts.total, "active": counts.active},
        match=twin.description(config.model, config.sequence_length),
        batch=_batch(config),
        data_key=key,
        data_ready=key is None or (Path(config.paths.data) / "tokens" / key).is_dir(),
        memory=memory_of(_held(ranks), machine),
        force=config.launcher.force,
        env=_environment(config, machine),
        command=shlex.join(rank_command(Path(run), WORKER)),
        notices=rules.notices(config),
        stop={"timeout": config.launcher.timeout, "grace": config.launcher.grace},
        flags=_flags(config, overrides, share, machine.platform, capabilities),
        capabilities=None if capabilities is None else str(capabilities),
    )
    return contain(plan, config, os.environ)


def check_memory(plan: LaunchPlan) -> None:
    """Raise `UserError` (3) with the arithmetic if devices or memory do not suffice (PROJ-2, RANK-3)."""
    if plan.devices is not None and plan.devices < plan.world:
        message = f"{plan.world} ranks need a GPU each, {plan.devices} are visible"
        fix = "take a mesh with fewer ranks, or platform=cpu"
        raise UserError([Problem("platform", message, fix, "RANK-3")], code=3)
    if plan.memory.fits is not False or plan.force:
        return
    fix = "take a smaller model, a larger mesh on a larger machine, or launcher.force=true to try"
    raise UserError([Problem("memory", f"{plan.memory.arithmetic}: it does not fit", fix, "PROJ-2")], code=3)


def _flags(
    config: Config, overrides: Sequence[str], share: Spread, platform: str, spur: Capabilities | None
) -> list[Flag]:
    """Of sbatch; jobs of a sweep that ask for the same are submitted together, so its name is the sweep's."""
    name = config.sweep.name or run_name(config).replace("/", "-")
    if config.launcher.name == "spur":
        assert spur is not None
        return spur_flags(config, overrides, share, platform, name, spur)
    if config.launcher.name == "slurm":
        return sbatch_flags(config, overrides, share, platform, name)
    return []


def _held(ranks: Sequence[RankPlan]) -> Counter[RankMemory]:
    held: Counter[RankMemory] = Counter()
    for rank in ranks:
        held[rank.memory] += rank.count
    return held


def _batch(config: Config) -> dict[str, int]:
    return {
        "global_batch_size": config.global_batch_size,
        "micro_batch_size": config.micro_batch_size,
        "data_ranks": config.mesh.data_ranks,
        "micro_batches": layout.micro_batches(config),
        "positions_per_step": config.global_batch_size * config.sequence_length,
    }


def _batch_text(batch: dict[str, int]) -> str:
    """G = N · b · data ranks, with the numbers (ENG-1)."""
    return (
        f"{batch['global_batch_size']} samples = {batch['micro_batches']} micro-batches x "
        f"{batch['micro_batch_size']} samples x {batch['data_ranks']} data ranks; "
        f"{batch['positions_per_step']:,} positions a step"
    )


def _rank_text(rank: RankPlan) -> str:
    place = " ".join(f"{axis}={value}" for axis, value in rank.coordinates.items() if axis != "tp")
    span = f"layers {', '.join(_runs(rank.layers))}"
    size = f"{rank.memory.parameters:,} parameters, {bytes_text(rank.memory.total)}"
    alike = f"; so {rank.count - 1:,} more" if rank.count > 1 else ""
    return f"rank {rank.rank}: {place}; {span}; {size}{alike}"


def _runs(numbers: list[int]) -> list[str]:
    """Ascending numbers as first-last of each contiguous run."""
    breaks = [i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1] + 1]
    runs = [numbers[i:j] for i, j in pairwise([0, *breaks, len(numbers)])]
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]


def memory_of(held: Mapping[RankMemory, int], machine: Machine) -> Memory:
    """All ranks share a CPU's memory; a GPU belongs to one rank. `held` says how many ranks hold what."""
    shared, world = machine.platform == "cpu", sum(held.values())
    counted = held if shared else {max(held, key=lambda rank: rank.total): 1}
    needed = sum(number * rank.total for rank, number in counted.items())
    whose = "the rank" if world == 1 else f"{world} ranks" if shared else "the largest rank"
    fits = None if machine.memory is None else needed <= machine.memory
    size = "" if machine.memory is None else f"{bytes_text(machine.memory)}, "
    terms = _sum_text(counted)
    words = f"{whose}: {terms} = {bytes_text(needed)}, of {size}{machine.source}"
    return Memory(fits, needed, machine.memory, words)


def _sum_text(held: Mapping[RankMemory, int]) -> str:
    parts = ("weights", "gradients", "optimizer", "unsharded", "activations")
    sums = {part: sum(number * getattr(rank, part) for rank, number in held.items()) for part in parts}
    terms = " + ".join(f"{part} {bytes_text(size)}" for part, size in sums.items())
    pending = sum(number * rank.pending for rank, number in held.items())
    return f"{terms} - pending gradients {bytes_text(pending)}"


def _environment(config: Config, machine: Machine) -> dict[str, str]:
    cache = Path(config.paths.cache or "unprobed")
    ranks, launcher = spread(config, machine.platform).ranks, config.launcher
    # On a scheduler's node are the cores that the job asks for, not those of this machine.
    is_remote = launcher.name in SCHEDULERS
    given = (launcher.cpus_per_task or ranks) if is_remote else cores()
    network = None if is_remote else Network()
    setting = Setting(config, machine.platform, ranks, cores=given, cache=cache, network=network)
    listed = rank_environment(setting, os.environ).public()
    return {name: value for name, value in sorted(listed.items()) if not value.startswith("unprobed/")}


def bytes_text(size: int) -> str:
    """Bytes as GiB, or as MiB below one GiB."""
    unit, name = (GIB, "GiB") if size >= GIB else (GIB // 1024, "MiB")
    return f"{size / unit:,.1f} {name}" if size < 100 * unit else f"{size / unit:,.0f} {name}"


def dry_run_text(plan: LaunchPlan) -> str:
    """What `dry_run=true` prints: the plan for a person, then one JSON object on a line of its own."""
    return f"{plan.text()}\n{json.dumps(plan.json())}"
