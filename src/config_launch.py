"""The schema of where a run goes: launcher, container, sweep.

A part of `src/config.py`, which imports it; nothing here imports torch (CFG-18).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from src.models.schema import choice

SCHEDULERS = ("slurm", "spur")
"""Launchers that submit jobs."""


def duration(default: str | None) -> Any:
    """A ``str`` field that holds a duration: ``90m``, ``1d12h``, ``HH:MM:SS`` or ``D-HH:MM:SS`` (CFG-5)."""
    return field(default=default, metadata={"duration": True})


@dataclass
class LauncherConfig:
    """Where ranks run."""

    name: str = choice("local", *SCHEDULERS, "direct")
    """`local` starts ranks here, `slurm` and `spur` submit jobs, `direct` is the rank of the environment."""
    slots: int | None = None
    """Ranks this machine takes side by side in a sweep; null is the number of GPUs, on CPU of cores."""
    parallel: str = "auto"
    """Number of jobs of a sweep side by side, or `auto`: slots divided by ranks per job."""
    timeout: str = duration("300s")
    """How long ranks wait for each other at start."""
    collective_timeout: str = duration("10m")
    """How long a rank waits for another in a collective; 30 minutes, if that is more, in the first step."""
    grace: str = duration("60s")
    """How long a stopped run may take to save before it is killed."""
    force: bool = False
    """Start although the memory estimate says that the model does not fit."""
    share_device: bool = False
    """For tests of the engine: ranks beyond the GPUs share them, over gloo, which copies through the host."""
    partition: str | None = None
    """Partition of the cluster; null is its default, here and for the next four."""
    account: str | None = None
    """Account that the job is charged to."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that nodes must have."""
    exclude: str | None = None
    """Nodes that must not be used; `@FILE` reads them from a file that `scripts/doctor.py` wrote."""
    time: str | None = duration(None)
    """Time limit of a job, on Slurm in whole minutes; null is the partition's. Elsewhere: of an attempt."""
    nodes: int | None = None
    """Nodes of a job; null is as few as the mesh needs."""
    gpus_per_node: int | None = None
    """GPUs of a node; null runs the job on CPUs, unless `platform` says otherwise."""
    gpu_memory: str | None = None
    """Memory of a GPU, such as `140GiB`; null asks the driver where ranks start, nobody for a job's nodes."""
    cpus_per_task: int | None = None
    """Cores of a node's task, which all its ranks share; null is one for each rank."""
    extra: dict[str, str] = field(default_factory=dict)
    """Other flags of `sbatch`, verbatim; set with `+launcher.extra.NAME=VALUE`, `"true"` for a bare one."""
    flags: str = ""
    """The same in one text, as on the command line of `sbatch`, in any spelling that it takes."""
    watchdog: str = duration("60s")
    """On Spur: how long a node of a job may be silent before the others take it for dead and end."""
    max_requeues: int = 10
    """How often a job that was stopped and has saved a newer checkpoint is queued again."""
    node_rank_from: str = choice("NODE_RANK", "completion_index", "hostname")
    """Where a pod without `NODE_RANK` finds its number: `JOB_COMPLETION_INDEX`, or its host name's end."""
    wait: bool = True
    """Follow the job to its end; `false` prints its id and returns."""
    on_interrupt: str = choice("cancel", "detach")
    """What Ctrl-C does to the job that is followed: cancel it, or let it run on."""
    checks: str = choice("none", "info", "strict")
    """Look at a node before its ranks start: not at all, and say what is wrong, or refuse to start (3)."""


@dataclass
class ContainerConfig:
    """Container that wraps the ranks of each node."""

    name: str = choice("none", "docker", "podman", "apptainer", "pyxis")
    """`none` runs on the machine itself; pyxis is Slurm's plugin, the others start the agent of a node."""
    image: str | None = None
    """Name of an image, or a file (apptainer, pyxis); podman takes a directory as root file system."""
    python: str = "python3"
    """Python of the image, which has torch and the other packages of a rank."""
    mounts: list[str] = field(default_factory=list)
    """Further mounts, `SOURCE` or `SOURCE:TARGET`, read-only unless `:rw` follows."""
    env: list[str] = field(default_factory=list)
    """Names of further variables that pass from the shell into the container; `*` stands for any letters."""
    args: list[str] = field(default_factory=list)
    """Further arguments of the runtime, verbatim and after ours, so that theirs win; of srun for pyxis."""


@dataclass
class SweepConfig:
    """How the jobs of a multirun are run."""

    name: str | None = None
    """Name of the sweep's directory; null derives it from the swept overrides."""
    job: str | None = None
    """Name of this job in its sweep; set by the launcher."""
    index: int | None = None
    """Place of this job in its sweep; set by the launcher."""
    keys: list[str] = field(default_factory=list)
    """Keys that the sweep varies; set by the launcher."""
    objective: str = choice("heldout_loss", "bits_per_byte", "last_loss", "best_loss", "tokens_per_s")
    """Column of the report that an adaptive sweeper reads."""
    fail_fast: bool = False
    """Stop the sweep at the first failed job."""
    prepare_parallel: int = 1
    """Token artifacts that are built side by side."""
