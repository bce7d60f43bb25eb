"""A node's agent in a container: starting it, seeing how it ended, cleaning up (CONT-2).

The runtime's client is a child of this process and its standard input a pipe that nobody writes to. Whoever
dies, the client or this process, the agent inside reads the end of that pipe and leaves with its ranks: a
daemon's container would outlive a killed client otherwise.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from src import runs
from src.code_identity import CHECKOUT
from src.config import SCHEDULERS, Config
from src.errors import UserError
from src.launchers.caches import cache_root
from src.launchers.container import (
    ContainerPlan,
    container_plan,
    is_wrapped,
    job_of,
    passed_names,
    typed_mount,
)
from src.launchers.container_command import Where, render
from src.machine import find_machine
from src.records import read_json, write_json

CLIENT_FAILED = (125, 126, 127)
"""Codes of a client whose container never ran the agent; apptainer's is 255."""
SLACK = 5.0
"""Seconds that the agent inside has on top to end its ranks by the same rules before it is killed itself."""
TAIL = 15
"""Lines of the runtime's output that stand in an error."""
PATIENCE = 60
"""Seconds that a question to the runtime may take."""
DIGEST = {
    "docker": "{{if .RepoDigests}}{{index .RepoDigests 0}}{{else}}{{.Id}}{{end}}",
    "podman": "{{.Digest}}",
}
"""What `image inspect` prints of an image."""
SAMPLE = 2**20
"""Bytes at either end of an image's file that its fingerprint covers; headers and indices lie there."""
NETWORK = ("/dev/infiniband",)
"""Devices of the network that a container gets where they are there."""


@dataclass(frozen=True)
class Inside:
    """What the agent in the container is told beside its run, as JSON."""

    cores: int
    """Cores of the node's ranks: the container's own count is that of the whole machine."""
    cache: str
    """Where compiler caches are mounted."""
    worker: str
    """Module that a rank runs."""
    jobs: int = 1
    """Jobs of a sweep side by side on the machine."""
    seat: int = 0
    """Which of them this is."""
    node: int = 0
    nodes: int = 1
    first_host: str = "localhost"
    job: int = 0
    """Number of the scheduler's job; 0 without one."""


def check_container(config: Config) -> None:
    """Raise `UserError` (3) where this machine lacks the runtime or a place that is to be mounted."""
    name = config.container.name
    if not is_wrapped(config):
        return
    if shutil.which(name) is None:
        fix = f"install {name}, choose another container=, or dry_run=true to see the command"
        raise UserError(f"container={name}: there is no {name} on PATH; {fix}", code=3)
    for what, path in (("the checkout", str(CHECKOUT)), *_typed_sources(config)):
        if not Path(path).exists():
            raise UserError(f"container={name}: {what} {path} is missing on this machine", code=3)


def _typed_sources(config: Config) -> Iterable[tuple[str, str]]:
    """What `container.mounts` names."""
    return (("the mount", typed_mount(text).source) for text in config.container.mounts)


class Contained:
    """The ranks of one node behind the agent in a container (`Ranks`)."""

    def __init__(self, run: Path, config: Config, inside: Inside, first: int) -> None:
        """Clean up after an attempt that was killed, fetch the image, start.

        Args:
            run: run directory.
            config: the run's.
            inside: what the agent is told.
            first: number of the node's first rank.
        """
        check_container(config)
        self._record = run / "control" / f"node.{inside.node}.json"
        self._log = run / "ranks" / f"node_{inside.node:05d}.log"
        self._first, self._node = first, inside.node
        config = replace(config, paths=replace(config.paths, cache=inside.cache))
        plan = container_plan(config, run, find_machine(config).platform, os.environ)
        plan = replace(plan, mounts=[mount for mount in plan.mounts if Path(mount.source).exists()])
        self._runtime = plan.runtime
        self._where = here(config, run, inside.node)
        self._log.parent.mkdir(exist_ok=True)
        remove(self._runtime, self._where)
        digest = fetch(plan, self._log)
        if inside.node == 0:
            note_digest(run, digest)
        words = ["-m", "src.launchers.node", str(run), "--inside", json.dumps(asdict(inside))]
        command = render(plan, self._where, words, os.environ)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command.argv,
                env={**os.environ, **command.variables},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def codes(self) -> dict[int, int] | None:
        """See `Ranks`; raises `UserError` (3) with the runtime's words where the agent never ran."""
        code = self._process.poll()
        if code is None:
            return None
        remove(self._runtime, self._where)
        record = read_json(self._record)
        if record is not None and record["codes"]:
            return {int(rank): int(value) for rank, value in record["codes"].items()}
        if record is not None:
            raise UserError(f"{record['type']}: {record['message']}", code=int(record["code"]))
        never_ran = CLIENT_FAILED if self._runtime != "apptainer" else (*CLIENT_FAILED, 255)
        if code in never_ran or code == 0:
            words = f"{self._runtime} ended with {code} and the agent left no record"
            raise UserError(f"{words}:\n{tail(self._log)}", code=3)
        return {self._first: code if code < 128 else 128 - code}

    def pids(self) -> list[int]:
        """The client's: killed, it takes the container along."""
        return [self._process.pid]

    def close(self) -> None:
        """See `Ranks`."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def here(config: Config, run: Path, node: int) -> Where:
    """The facts of this node."""
    platform = find_machine(config).platform
    kfd = [Path("/dev/kfd"), *Path("/dev/dri").glob("render*")] if platform == "rocm" else []
    return Where(
        job=job_of(run, os.environ.get("SLURM_JOB_ID") if config.launcher.name in SCHEDULERS else None),
        node=str(node),
        attempt=str(runs.attempts(run)),
        code=str(CHECKOUT),
        passed=passed_names(config, os.environ),
        uid=os.getuid(),
        gid=os.getgid(),
        groups=tuple(sorted({device.stat().st_gid for device in kfd if device.exists()})),
        devices=tuple(device for device in NETWORK if Path(device).exists()),
    )


def cache_base(config: Config) -> str:
    """The directory below which caches lie by version, which are those of the container."""
    return str(cache_root(config)[0].parent)


def remove(runtime: str, where: Where) -> None:
    """Remove this node's containers of this job, whatever attempt left them; no other is touched."""
    if runtime == "apptainer":
        return
    filters = [word for label in where.labels() for word in ("--filter", f"label={label}")]
    found = ask(runtime, "ps", "--all", "--quiet", *filters)
    for number in (found or "").split():
        ask(runtime, "rm", "--force", number)


def fetch(plan: ContainerPlan, log: Path) -> str | None:
    """Have the image here, and return what identifies it; None where nothing does.

    Raises:
        UserError: the image cannot be had (3).
    """
    if plan.image.startswith("/"):
        return fingerprint(Path(plan.image.removesuffix(":O")))
    if plan.runtime == "apptainer":
        return plan.digest
    question = (plan.runtime, "image", "inspect", "--format", DIGEST[plan.runtime], plan.image)
    digest = ask(*question)
    if digest is None:
        with log.open("ab") as output:
            command = [plan.runtime, "pull", plan.image]
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
            )
        if done.returncode != 0:
            raise UserError(f"{plan.runtime} cannot pull {plan.image}:\n{tail(log)}", code=3)
        digest = ask(*question)
    return (digest or "").strip() or None


def fingerprint(image: Path) -> str | None:
    """Identity of an image's file: size, first and last MiB; None for a directory, which has none.

    Raises:
        UserError: there is no such file (3).
    """
    if image.is_dir():
        return None
    try:
        with image.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            text = file.read(SAMPLE)
            file.seek(max(0, size - SAMPLE))
            text += file.read(SAMPLE)
    except OSError as error:
        raise UserError(f"the image {image} cannot be read: {error.strerror}", code=3) from error
    return f"fingerprint:{hashlib.sha256(f'{size}:'.encode() + text).hexdigest()}"


def note_digest(run: Path, digest: str | None) -> None:
    """Write the image's identity into `plan.json`."""
    plan = read_json(run / "plan.json")
    if plan is not None and plan.get("container") is not None:
        plan["container"]["digest"] = digest
        write_json(run / "plan.json", plan)


def ask(*command: str) -> str | None:
    """What the runtime answers; None if it does not, or says no."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def tail(log: Path) -> str:
    """The last lines of the runtime's output."""
    lines: Sequence[str] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
    return "\n".join(f"  {line}" for line in lines)
