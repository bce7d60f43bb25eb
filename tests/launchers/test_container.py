"""What each runtime is told: tables of words, and what is refused before anything starts (CONT)."""

from __future__ import annotations

import csv
import json
import shlex
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from src.compose import compose
from src.config import Config, ContainerConfig
from src.errors import UserError
from src.launchers import container, container_command, node, scheduler
from src.launchers.container import Mount, container_plan, ordered, passed_names
from src.launchers.container_command import Where, contain, pyxis, render
from src.launchers.flags import Flag
from src.launchers.plan import LaunchPlan, make_plan
from src.launchers.slurm import Slurm
from src.validate import validate

RUN, CODE = Path("/r/one"), "/code"
SECRET = "hf_" + "q" * 20
SHELL = {
    "HF_TOKEN": SECRET,
    "HF_HOME": "/models/hub",
    "NCCL_DEBUG": "INFO",
    "PYTHONPATH": "/elsewhere",
    "PATH": "/bin",
    "MINE_A": "1",
    "OTHER": "2",
}
NAMES = ("HF_HOME", "HF_TOKEN", "MINE_A", "NCCL_DEBUG")


@pytest.fixture(autouse=True)
def no_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor sets the place of its cache where it compiles, and a set one is mounted."""
    for name in container.CACHES:
        monkeypatch.delenv(name, raising=False)


@cache
def base() -> Config:
    return compose(["data=stdlib", "paths.runs=/r", "paths.data=/d", "paths.cache=/c"]).config


def boxed(name: str, image: str | None = "lab/torch:2", launcher: str = "local", **fields: Any) -> Config:
    """A config in a container, without composing it each time."""
    wanted = ContainerConfig(name, image, env=["MINE_*"])
    where = replace(base().launcher, name=launcher)
    return replace(base(), container=replace(wanted, **fields), launcher=where)


def words(name: str, platform: str, image: str = "lab/torch:2", args: Any = (), **facts: Any) -> str:
    """The command on a node, a blank between words."""
    config = boxed(name, image, args=list(args))
    plan = container_plan(config, RUN, platform, SHELL)
    where = Where("77", "1", "3", CODE, passed_names(config, SHELL), 1000, 100)
    return shlex.join(render(plan, replace(where, **facts), ["-m", "agent"], SHELL).argv)


NAMED = "--name=manyhead-77-1-3 --label=manyhead.job=77 --label=manyhead.node=1 --network=host --ipc=host"
VARIABLES = (
    "--workdir=/code --env=HF_HOME --env=HF_TOKEN --env=MINE_A --env=NCCL_DEBUG --env=PYTHONSAFEPATH=1 "
    "--env=PYTHONPATH=/code --env=HOME=/tmp"
)
MOUNTS = " ".join(
    f"--mount=type=bind,source={path},target={path}{mode}"
    for path, mode in [
        ("/c", ""),
        ("/code", ",readonly"),
        ("/d", ""),
        ("/models/hub", ""),
        ("/r", ",readonly"),
        ("/r/one", ""),
    ]
)
BINDS = "--bind=/c:/c --bind=/code:/code:ro --bind=/d:/d --bind=/models/hub:/models/hub --bind=/r:/r:ro"
INNER = """/bin/sh -c 'trap "" TERM USR1 USR2; exec "$0" "$@"' python3 -m agent"""
MEMLOCK = "--ulimit=memlock=-1 --ulimit=stack=67108864 --user=1000:100"
TABLE = {
    (
        "docker",
        "cpu",
    ): f"docker run --rm --interactive {NAMED} {MEMLOCK} {VARIABLES} {MOUNTS} lab/torch:2 {INNER}",
    ("docker", "cuda"): f"docker run --rm --interactive {NAMED} {MEMLOCK} --gpus=all {VARIABLES} {MOUNTS} "
    f"lab/torch:2 {INNER}",
    (
        "docker",
        "rocm",
    ): f"docker run --rm --interactive {NAMED} {MEMLOCK} --device=/dev/kfd --device=/dev/dri "
    f"{VARIABLES} {MOUNTS} lab/torch:2 {INNER}",
    (
        "podman",
        "cpu",
    ): f"podman run --rm --interactive {NAMED} --user=0:0 {VARIABLES} {MOUNTS} lab/torch:2 {INNER}",
    ("podman", "cuda"): f"podman run --rm --interactive {NAMED} --user=0:0 --device=nvidia.com/gpu=all "
    f"{VARIABLES} {MOUNTS} lab/torch:2 {INNER}",
    (
        "podman",
        "rocm",
    ): f"podman run --rm --interactive {NAMED} --user=0:0 --device=/dev/kfd --device=/dev/dri "
    f"{VARIABLES} {MOUNTS} lab/torch:2 {INNER}",
    **{
        ("apptainer", platform): f"apptainer exec --cleanenv --no-home --pwd=/code {gpu}{BINDS} "
        f"--bind=/r/one:/r/one lab/torch:2 {INNER}"
        for platform, gpu in (("cpu", ""), ("cuda", "--nv "), ("rocm", "--rocm "))
    },
}


@pytest.mark.parametrize(("name", "platform"), TABLE)
def test_commands(name: str, platform: str) -> None:
    """CONT-1, CONT-2: the whole command of each runtime on each platform."""
    assert words(name, platform) == TABLE[name, platform]


def test_commands_of_one_node() -> None:
    """CONT-1: devices, their groups, a root file system, and the user's own words, which come last."""
    rocm = words("docker", "rocm", groups=(44, 109), devices=("/dev/infiniband",))
    assert "--user=1000:100 --group-add=44 --group-add=109 --device=/dev/kfd" in rocm
    assert "--device=/dev/dri --device=/dev/infiniband --workdir" in rocm
    assert "--group-add=keep-groups" in words("podman", "rocm", groups=(44,))
    assert "infiniband" not in words("docker", "cpu", devices=("/dev/infiniband",))
    mine = words("podman", "cpu", "/images/root:O", ["--ipc=private"])
    assert mine.endswith(f"target=/r/one --ipc=private --rootfs /images/root:O {INNER}")


def test_pyxis() -> None:
    """CONT-1: srun's flags; an array's one line of srun names no single run."""
    config = boxed("pyxis", "lab+torch:2", "slurm", mounts=["/w"])
    plan = container_plan(config, RUN, "rocm", SHELL)
    assert pyxis(plan, NAMES) == [
        "--container-image=lab+torch:2",
        "--container-mounts=/c:/c,/d:/d,/models/hub:/models/hub,/r:/r,/w:/w:ro,"
        "/dev/kfd:/dev/kfd,/dev/dri:/dev/dri",
        "--no-container-mount-home",
        "--container-env=PYTHONPATH,PYTHONSAFEPATH,HF_HOME,HF_TOKEN,MINE_A,NCCL_DEBUG",
    ]


def test_secrets_go_by_name() -> None:
    """CONT-1, CFG-16: no value of the shell is in a command; apptainer is told by its environment."""
    for name, platform in TABLE:
        assert SECRET not in words(name, platform)
    config = boxed("apptainer", "/i.sif")
    plan = container_plan(config, RUN, "cpu", SHELL)
    told = render(plan, Where("j", "0", "1", CODE, NAMES), ["agent"], SHELL)
    assert told.variables["APPTAINERENV_HF_TOKEN"] == SECRET
    assert told.variables["APPTAINERENV_PYTHONPATH"] == CODE
    assert "APPTAINERENV_OTHER" not in told.variables


def test_names() -> None:
    """CONT-1: what is set outside passes if it is ours to pass, what is not set does not appear."""
    config = replace(boxed("docker"), env={"OTHER": "3"})
    assert passed_names(config, SHELL) == (*NAMES, "OTHER")
    assert passed_names(config, {}) == ()


def test_mounts(tmp_path: Path) -> None:
    """CONT-1: read-only but for what a run writes, parents first; the writable one of two holds."""
    mine = boxed("docker", mounts=["/d", "/x,y:/z:rw", "/a/b"])
    listed = container.mounts_of(mine, RUN, {})
    assert [(m.target, m.writable) for m in listed] == [
        *(("/a/b", False), ("/c", True), ("/d", True), ("/r", False), ("/r/one", True), ("/z", True)),
    ]
    resumed = replace(boxed("docker"), resume="/old/step", init_from="/w.safetensors")
    assert {m.target for m in container.mounts_of(resumed, RUN, {}) if not m.writable} == {
        *("/old/step", "/w.safetensors", "/r"),
    }
    (row,) = csv.reader([container_command._bind(Mount('/a,"b', "/t", False, ""))])
    assert row == ["type=bind", 'source=/a,"b', "target=/t", "readonly"]
    with pytest.raises(UserError, match="colon or a comma: /x,y"):
        container_plan(replace_name(mine, "apptainer"), RUN, "cpu", {})


def replace_name(config: Config, name: str) -> Config:
    return replace(config, container=replace(config.container, name=name))


def test_parents_come_first() -> None:
    """CONT-1: in the other order the read-only parent would cover the run's own mount."""
    order = [m.target for m in ordered([Mount("/r/one", "/r/one", True, ""), Mount("/r", "/r", False, "")])]
    assert order == ["/r", "/r/one"]


def test_mutation_a_value_in_a_command_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """CONT-1: with values beside the names the secret stands in each command of docker and podman."""
    monkeypatch.setattr(container_command, "_variables", lambda plan, where: {"HF_TOKEN": SECRET})
    assert all(SECRET in words(name, platform) for name, platform in TABLE if name != "apptainer")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"image": None}, "container.image"),
    ({"image": "/a.sif"}, "container.image"),
    ({"image": "--privileged"}, "container.image"),
    ({"name": "pyxis"}, "container"),
    ({"launcher": "direct"}, "container"),
    ({"mounts": ["data"]}, "container.mounts"),
    ({"mounts": ["/a:/b:/c"]}, "container.mounts"),
    ({"env": ["A=b"]}, "container.env"),
    ({"args": ["--env=A=b"]}, "container.args"),
    ({"args": ["--name=x"]}, "container.args"),
]


@pytest.mark.parametrize(("fields", "key"), WRONG, ids=lambda value: str(value)[-30:])
def test_refused(fields: dict[str, Any], key: str) -> None:
    """CONT-1, law 6: one problem at composition."""
    assert [problem.key for problem in validate(boxed(**{"name": "docker", **fields}))] == [key]


def test_plan_shows_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CONT-2, CFG-17: a dry run needs no runtime; digest by name; a rank's Python is the image's."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", SECRET)
    digest = "sha256:" + "a" * 64
    config = boxed("docker", f"lab/t@{digest}", python="/p")
    plan = make_plan(config, [])
    assert plan.container is not None
    assert plan.container.digest == digest
    assert "--env=HF_TOKEN " in plan.container.command
    assert " /p -P -m src.trainer.worker" in plan.command
    text = plan.text() + json.dumps(plan.json())
    assert SECRET not in text
    assert "docker run --rm" in text
    none = boxed("none", "i")
    assert contain(replace(plan, container=None), none, {}).container is None


def test_no_container_is_valid() -> None:
    """A site file may name an image that only a chosen runtime uses."""
    assert validate(boxed("none", "i")) == []


def test_pyxis_is_a_matter_of_srun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CONT-1, PLAN-7: pyxis adds flags and an agent to the line of srun; podman's script asks for no signal,
    which submitit adds by itself; other runtimes change nothing."""
    pytest.importorskip("submitit", reason="submitit is not installed")
    from src.launchers.remote_sweep import groups

    def planned(name: str, image: str) -> tuple[str, LaunchPlan]:
        config = boxed(name, image, "slurm", python="/opt/python")
        config = replace(config, run_name="one", paths=replace(config.paths, runs=str(tmp_path)))
        plan = make_plan(config, [])
        return Slurm().script(config, [plan]), plan

    bare, _ = planned("none", "i")
    assert planned("apptainer", "i")[0] == bare
    (signal,) = (line for line in bare.splitlines(keepends=True) if "--signal" in line)
    assert planned("podman", "i")[0] == bare.replace(signal, "")
    script, plan = planned("pyxis", "lab+t:2")
    (line,) = (line for line in script.splitlines() if line.startswith("srun "))
    assert f"--container-image=lab+t:2 --container-mounts=/c:/c,/d:/d,{tmp_path}:{tmp_path} --no-con" in line
    assert line.endswith(
        """ 'trap "" TERM USR1 USR2; exec "$0" "$@"' /opt/python -m src.launchers.node "$run\""""
    )
    other = planned("pyxis", "lab+t:3")[1]
    assert groups([plan, other, plan]) == [[0, 2], [1]]


def test_podman_looks_at_the_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """AGENT-2: a signal to every process of a step ends podman's monitor, so the agent asks for the stop."""
    flags = {name: [flag.name for flag in _flags(boxed(name, "i", "slurm"))] for name in ("podman", "docker")}
    assert ("signal" in flags["podman"], "signal" in flags["docker"]) == (False, True)
    monkeypatch.setattr(Slurm, "time_left", lambda self, number: 61)
    (tmp_path / "control").mkdir()
    stop = tmp_path / "control" / "stop"
    for name, number in (("docker", 0), ("podman", 1)):
        node.stop_before_limit(tmp_path, boxed(name, "i", "slurm"), node.Place(number, 2, "n1", 7))
    time.sleep(1.2)
    assert not stop.exists()
    timed = boxed("podman", "i", "slurm")
    timed = replace(timed, launcher=replace(timed.launcher, time="2m"))
    node.stop_before_limit(tmp_path, timed, node.Place(0, 2, "n1", 7))  # The watcher keeps that one.
    time.sleep(1.2)
    assert not stop.exists()
    node.stop_before_limit(tmp_path, boxed("podman", "i", "slurm"), node.Place(0, 2, "n1", 7))
    assert not stop.exists()
    end = time.monotonic() + 10
    while not stop.exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def _flags(config: Config) -> list[Flag]:
    return make_plan(config, []).flags


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1-02:03:04\n", 93784),
        ("2:03:04", 7384),
        ("59:01", 3541),
        ("0:09", 9),
        ("UNLIMITED", None),
        ("", None),
    ],
)
def test_time_left(text: str, found: int | None) -> None:
    """AGENT-2: squeue's way to print a time."""
    assert scheduler.seconds_of(text) == found


def test_refused_where_ranks_are_started_already() -> None:
    """CONT-1: a rank of torchrun does not put itself into a container."""
    from src.launchers.direct import lead
    from src.launchers.places import Place

    place = Place("torchrun", 0, 1, 0, 1, 1, "localhost", 29501)
    with pytest.raises(UserError, match="torchrun has started the ranks already"):
        lead(place, ["data=synthetic", "container=docker", "container.image=i"])
