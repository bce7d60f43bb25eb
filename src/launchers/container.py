"""What a container gets: mounts and variables, pure functions of config and shell (CONT-1)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from src.config import Config
from src.errors import Problem, UserError
from src.launchers.environment import TABLE

PASSED = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING"),
    *("NCCL_*", "RCCL_*", "UCX_*", "GLOO_*", "TORCH_*", "TRITON_*", "OMP_*", "MANYHEAD_*", "SLURM_JOB_ID"),
    *("HF_*", "WANDB_*", "http_proxy", "https_proxy", "no_proxy", "TZ"),
)
"""Patterns of variables that pass beside those of the environment table, `env` and `container.env`."""
KEPT_OUT = ("PATH", "PYTHONPATH", "HOME", "LD_LIBRARY_PATH")
"""The image's own: the host's name places that are not there."""
CACHES = {row.name for row in TABLE if row.kind == "path"} - set(KEPT_OUT)
"""Variables that name a directory of a cache; set outside, they are mounted where they point."""


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
