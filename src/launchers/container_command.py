"""How each runtime is told of a container: pure functions of plan, shell and node (CONT).

The agent of a node runs in the container with all its ranks; on the host remains a process that starts the
runtime and looks at the run directory, which both see (`src/launchers/contained.py`). pyxis has no such
process: srun itself makes the container, by flags of its own.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from src.config import SCHEDULERS, Config
from src.launchers.container import ContainerPlan, Mount, container_plan, job_of, ordered, passed_names
from src.launchers.ranks import UNMOVED, WORKER, rank_command

if TYPE_CHECKING:
    from src.launchers.plan import LaunchPlan

HOME = "/tmp"
"""Home of a user whom the image does not know."""
GPU_FLAGS: dict[tuple[str, str], tuple[str, ...]] = {
    ("docker", "cuda"): ("--gpus=all",),
    ("podman", "cuda"): ("--device=nvidia.com/gpu=all",),
    ("apptainer", "cuda"): ("--nv",),
    ("docker", "rocm"): ("--device=/dev/kfd", "--device=/dev/dri"),
    ("podman", "rocm"): ("--device=/dev/kfd", "--device=/dev/dri"),
    ("apptainer", "rocm"): ("--rocm",),
}
"""What shows a platform's devices; which of them a rank takes is said by the same variables as outside."""
LIMITS = {"docker": ("--ulimit=memlock=-1", "--ulimit=stack=67108864")}
"""docker's daemon has limits of its own, too low for InfiniBand; podman's containers inherit the caller's."""


@dataclass(frozen=True)
class Where:
    """What one node knows."""

    job: str
    node: str
    attempt: str
    code: str
    """Checkout or snapshot that the agent imports."""
    passed: tuple[str, ...] = ()
    """Names of variables that are set outside and pass."""
    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()
    """Groups that own the devices."""
    devices: tuple[str, ...] = ()
    """Devices of the network that are there."""

    @property
    def name(self) -> str:
        """Unique per job, node and attempt."""
        return f"manyhead-{self.job}-{self.node}-{self.attempt}"

    def labels(self) -> list[str]:
        """What finds this node's containers of the job again, and nothing else."""
        return [f"manyhead.job={self.job}", f"manyhead.node={self.node}"]


@dataclass(frozen=True)
class Command:
    """What is started on the host."""

    argv: list[str]
    variables: dict[str, str]
    """Added to its environment, for a runtime that is told so what the container gets."""


def contain(plan: LaunchPlan, config: Config, shell: Mapping[str, str]) -> LaunchPlan:
    """The plan with its container, if the config wants one: a pure function plan → plan.

    Raises:
        UserError: a path that the runtime cannot be told (2).
    """
    if config.container.name == "none":
        return plan
    run = Path(plan.run_directory)
    found = container_plan(config, run, plan.platform, shell)
    passed = passed_names(config, shell)
    if found.runtime == "pyxis":
        words = pyxis(found, passed)
    else:
        job = "JOB" if config.launcher.name in SCHEDULERS else job_of(run, None)
        where = Where(job=job, node="NODE", attempt="ATTEMPT", code="CODE", passed=passed)
        words = render(found, where, ["-m", "src.launchers.node", str(run)], shell).argv
    ranks = shlex.join(rank_command(run, WORKER, config.container.python))
    return replace(plan, container=replace(found, command=shlex.join(words)), command=ranks)


def render(plan: ContainerPlan, where: Where, inner: Sequence[str], shell: Mapping[str, str]) -> Command:
    """The runtime's command around `python INNER…`; no value of the shell stands in it (CONT-1).

    Args:
        plan: of the launch.
        where: the node's own facts.
        inner: arguments of the container's Python.
        shell: where the values of `where.passed` are taken from.
    """
    code = Mount(where.code, where.code, False, "the code")
    full = replace(plan, mounts=ordered([code, *plan.mounts]))
    payload = [plan.image, *UNMOVED, plan.python, *inner]
    if plan.runtime == "apptainer":
        values = {name: shell.get(name, "") for name in where.passed} | _variables(plan, where)
        return Command(
            [*_apptainer(full, where), *payload], {f"APPTAINERENV_{k}": v for k, v in values.items()}
        )
    return Command([*_oci(full, where), *payload], {})


def _variables(plan: ContainerPlan, where: Where) -> dict[str, str]:
    return {**plan.variables, "PYTHONPATH": where.code}


def _oci(plan: ContainerPlan, where: Where) -> list[str]:
    """docker and podman, which read the same words but for users and devices."""
    is_root_file_system = plan.runtime == "podman" and plan.image.startswith("/")
    return [
        *(plan.runtime, "run", "--rm", "--interactive", f"--name={where.name}"),
        *(f"--label={label}" for label in where.labels()),
        *("--network=host", "--ipc=host", *LIMITS.get(plan.runtime, ())),
        *_user(plan.runtime, where),
        *GPU_FLAGS.get((plan.runtime, plan.platform), ()),
        *(f"--device={device}" for device in where.devices if plan.platform != "cpu"),
        f"--workdir={where.code}",
        *(f"--env={name}" for name in where.passed),
        *(f"--env={name}={value}" for name, value in {**_variables(plan, where), "HOME": HOME}.items()),
        *(f"--mount={_bind(mount)}" for mount in plan.mounts),
        *plan.args,
        *(("--rootfs",) if is_root_file_system else ()),
    ]


def _user(runtime: str, where: Where) -> list[str]:
    """Files belong to the caller: whom docker's daemon has to be told, and podman's root is already."""
    if runtime == "podman":
        return ["--user=0:0", *(["--group-add=keep-groups"] if where.groups and where.uid else [])]
    return [f"--user={where.uid}:{where.gid}", *(f"--group-add={group}" for group in where.groups)]


def _bind(mount: Mount) -> str:
    """A line of comma-separated values, in which a path may hold anything."""
    parts = ["type=bind", f"source={mount.source}", f"target={mount.target}"]
    parts += [] if mount.writable else ["readonly"]
    return ",".join('"' + part.replace('"', '""') + '"' if set(part) & set(',"') else part for part in parts)


def _apptainer(plan: ContainerPlan, where: Where) -> list[str]:
    return [
        *("apptainer", "exec", "--cleanenv", "--no-home", f"--pwd={where.code}"),
        *GPU_FLAGS.get((plan.runtime, plan.platform), ()),
        *(f"--bind={mount.source}:{mount.target}{'' if mount.writable else ':ro'}" for mount in plan.mounts),
        *plan.args,
    ]


def pyxis(plan: ContainerPlan, passed: Sequence[str]) -> list[str]:
    """Flags of srun; the plugin passes the environment, but an image's own values would win over it."""
    devices = ["/dev/kfd:/dev/kfd", "/dev/dri:/dev/dri"] if plan.platform == "rocm" else []
    mounts = [f"{m.source}:{m.target}{'' if m.writable else ':ro'}" for m in plan.mounts]
    return [
        f"--container-image={plan.image}",
        f"--container-mounts={','.join([*mounts, *devices])}",
        "--no-container-mount-home",
        f"--container-env={','.join(['PYTHONPATH', 'PYTHONSAFEPATH', *passed])}",
        *plan.args,
    ]
