"""What a container gets and how each runtime is told: pure functions of config, shell and node (CONT).

The agent of a node runs in the container with all its ranks; on the host remains a process that starts the
runtime and looks at the run directory, which both see (`src/launchers/contained.py`). pyxis has no such
process: srun itself makes the container, by flags of its own.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from src.config import Config
from src.errors import Problem, UserError
from src.launchers.environment import TABLE
from src.launchers.ranks import WORKER, rank_command

if TYPE_CHECKING:
    from src.launchers.plan import LaunchPlan

PASSED = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING"),
    *("NCCL_*", "RCCL_*", "UCX_*", "GLOO_*", "TORCH_*", "TRITON_*", "OMP_*", "MANYHEAD_*", "SLURM_JOB_ID"),
    *("HF_*", "WANDB_*", "MLFLOW_*", "DATABRICKS_*", "http_proxy", "https_proxy", "no_proxy", "TZ"),
)
"""Patterns of variables that pass beside those of the environment table, `env` and `container.env`."""
KEPT_OUT = ("PATH", "PYTHONPATH", "HOME", "LD_LIBRARY_PATH")
"""The image's own: the host's name places that are not there."""
CACHES = ({row.name for row in TABLE if row.kind == "path"} | {"HF_HOME"}) - set(KEPT_OUT)
"""Variables that name a directory of a cache; set outside, they are mounted where they point."""
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
class Mount:
    """A place of the host that the container sees."""

    source: str
    target: str
    writable: bool
    reason: str


@dataclass(frozen=True)
class ContainerPlan:
    """The container of a launch, but for what differs between its nodes."""

    runtime: str
    image: str
    digest: str | None
    """Identity of the image; null until it is known to the machine that runs it."""
    platform: str
    python: str
    mounts: list[Mount]
    """Parents before what lies below them."""
    args: list[str]
    variables: dict[str, str]
    """Set in the container, whatever the shell says."""
    command: str
    """Of a node's agent, quoted for a shell; NODE, ATTEMPT, JOB and CODE are the node's own. For pyxis the
    flags of srun."""


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


def is_wrapped(config: Config) -> bool:
    """Whether the agent of a node has to start a container; pyxis has done so already."""
    return config.container.name not in ("none", "pyxis")


def container_plan(config: Config, run: Path, platform: str, shell: Mapping[str, str]) -> ContainerPlan:
    """The container of a run, a pure function of its config and the shell.

    Raises:
        UserError: a path that the runtime cannot be told (2).
    """
    wanted = config.container
    assert wanted.image is not None
    mounts = mounts_of(config, run, shell)
    if wanted.name in ("apptainer", "pyxis"):
        _refuse_separators(wanted.name, mounts)
    return ContainerPlan(
        runtime=wanted.name,
        image=wanted.image,
        digest=pinned(wanted.image),
        platform=platform,
        python=wanted.python,
        mounts=mounts,
        args=list(wanted.args),
        variables={"PYTHONSAFEPATH": "1"},
        command="",
    )


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
        job = "JOB" if config.launcher.name == "slurm" else job_of(run, None)
        where = Where(job=job, node="NODE", attempt="ATTEMPT", code="CODE", passed=passed)
        words = render(found, where, ["-m", "src.launchers.node", str(run)], shell).argv
    ranks = shlex.join(rank_command(run, WORKER, config.container.python))
    return replace(plan, container=replace(found, command=shlex.join(words)), command=ranks)


def job_of(run: Path, scheduler_id: str | None) -> str:
    """Name of a launch: the scheduler's, else one that the run directory has to itself."""
    return scheduler_id or f"local-{hashlib.sha256(str(run).encode()).hexdigest()[:12]}"


def pinned(image: str) -> str | None:
    """The digest in an image's own name."""
    digest = image.partition("@")[2]
    return digest if digest.startswith("sha256:") else None


def passed_names(config: Config, shell: Mapping[str, str]) -> tuple[str, ...]:
    """Names of variables that are set in the shell and pass into the container, in order."""
    patterns = (*PASSED, *(row.name for row in TABLE), *config.env, *config.container.env)
    found = (name for name in shell if any(fnmatchcase(name, pattern) for pattern in patterns))
    return tuple(sorted(name for name in found if name not in KEPT_OUT))


def mounts_of(config: Config, run: Path, shell: Mapping[str, str]) -> list[Mount]:
    """Every place that the ranks need; of one that is named twice the writable mount holds."""
    paths = config.paths
    # An array has one srun line for all its runs, so that pyxis cannot be told of each.
    runs_writable = config.container.name == "pyxis"
    own = [
        Mount(paths.runs, paths.runs, runs_writable, "paths.runs, and the code of submitted jobs in it"),
    ]
    own += [] if config.data.kind == "synthetic" else [Mount(paths.data, paths.data, True, "paths.data")]
    own += [] if runs_writable else [Mount(str(run), str(run), True, "the run's directory")]
    own += [Mount(path, path, False, reason) for path, reason in _read_only(config) if path is not None]
    own += [
        Mount(shell[name], shell[name], True, name)
        for name in sorted(CACHES)
        if shell.get(name, "")[:1] == "/"
    ]
    if paths.cache is not None:
        own.append(Mount(paths.cache, paths.cache, True, "paths.cache"))
    return ordered([*own, *(typed_mount(text) for text in config.container.mounts)])


def _read_only(config: Config) -> Iterable[tuple[str | None, str]]:
    """Places outside the run that a rank reads."""
    yield config.init_from, "init_from"
    yield (config.resume if "/" in config.resume else None), "resume"
    path = config.tokenizer.path
    yield (path if path is not None and path.startswith("/") else None), "tokenizer.path"
    yield getattr(config.model, "path", None), "model.path"


def typed_mount(text: str) -> Mount:
    """One entry of `container.mounts`, which validation has looked at."""
    writable = text.endswith(":rw")
    source, _, target = text.removesuffix(":rw").removesuffix(":ro").partition(":")
    return Mount(source, target or source, writable, "container.mounts")


def ordered(mounts: Iterable[Mount]) -> list[Mount]:
    """One mount for each target, parents first, since a later mount covers what lies below it."""
    found: dict[str, Mount] = {}
    for mount in mounts:
        if mount.target not in found or mount.writable:
            found[mount.target] = mount
    return [found[target] for target in sorted(found)]


def _refuse_separators(runtime: str, mounts: Sequence[Mount]) -> None:
    wrong = [path for mount in mounts for path in (mount.source, mount.target) if set(path) & set(":,")]
    if wrong:
        message = f"{runtime} cannot be told of a path with a colon or a comma: {wrong[0]}"
        raise UserError([Problem("container", message, "take another directory", "CONT-1")])


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
    payload = [plan.image, plan.python, *inner]
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
