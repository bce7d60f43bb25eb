"""Checks of nodes: what is looked at, what hangs, lists of nodes (CHECK)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from src.code_identity import CHECKOUT
from src.compose import compose
from src.config import Config, ContainerConfig, PathsConfig
from src.errors import UserError
from src.launchers import allocation, checks, node_facts
from src.launchers.checks import Check, NodeReport, check_before_ranks, check_node, judge
from src.launchers.hostlist import expand
from src.resolve import resolve

NAMES = [
    *("disk", "writable", "shm", "memlock", "ports", "clock", "names", "processors", "packages", "launchers"),
]
SEEN = {"name": "a card", "total": 80 * 2**30, "taken": 2**29, "finite": True}


@cache
def base() -> Config:
    return compose(["data=synthetic"]).config


def made(runs: Path | str = "/tmp", **thresholds: str) -> Config:
    """A config with runs, data and caches below a folder, and thresholds of its own."""
    paths = PathsConfig(f"{runs}/runs", f"{runs}/data", f"{runs}/cache")
    limits = replace(base().platform.thresholds, **thresholds)
    return replace(base(), paths=paths, platform=replace(base().platform, thresholds=limits))


def launched(config: Config, **fields: Any) -> Config:
    return replace(config, launcher=replace(config.launcher, **fields))


BOXED = ContainerConfig("docker", "i")


def states(report: NodeReport) -> dict[str, str]:
    return {check.name: check.state for check in report.checks}


def test_this_machine(tmp_path: Path) -> None:
    """CHECK-1: all checks without a GPU well within 20 s; what is not enough fails, and nothing else does."""
    started = time.monotonic()
    report = check_node(made(tmp_path, disk="0B"))
    assert time.monotonic() - started < 20.0
    assert list(states(report)) == NAMES
    assert report.passed, report.text()
    assert not list(tmp_path.glob("runs/*"))
    short = check_node(made(tmp_path, disk="9000TiB", shm="9000TiB"))
    assert [name for name, state in states(short).items() if state != "ok"] == ["disk", "shm"]
    assert not short.passed


def test_limits_that_are_missed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CHECK-1: each fact beside its threshold, by the numbers of a machine that is not this one."""
    config = made(tmp_path, memlock="unlimited")
    monkeypatch.setattr(node_facts.resource, "getrlimit", lambda what: (100, 100))
    assert not node_facts.memlock(config)[0]
    assert not node_facts.processors(config)[0]
    monkeypatch.setattr(node_facts.socket, "gethostname", lambda: "no.such.host.invalid")
    assert not node_facts.names(config)[0]
    monkeypatch.setattr(node_facts, "package_version", lambda name: "2.10.1" if name == "torch" else "1")
    assert node_facts.packages(config)[1].endswith("torch 2.11 to 2.13 wanted")
    monkeypatch.setattr(node_facts.time, "time", lambda: 1000.0)
    assert not node_facts.clock(config)[0]
    assert node_facts.launchers(replace(config, container=ContainerConfig("apptainer", "i")))[1].endswith(
        "wanted"
    )


def gpu_machine(monkeypatch: pytest.MonkeyPatch, devices: int) -> Config:
    config = made(probe="1s")
    machine = checks.find_machine(config)
    shown = type(machine)("cuda", devices, None, "a test")
    monkeypatch.setattr(checks, "find_machine", lambda config: shown)
    monkeypatch.setattr(checks, "CHECKS", {"disk": node_facts.disk})
    return config


def probe_of(index: int) -> list[str]:
    """A card that is well, one that hangs, one whose driver fails, one with another's memory on it."""
    taken = json.dumps(SEEN | {"taken": 9 * 2**30})
    lines = [f"print({json.dumps(SEEN)!r})", "import time; time.sleep(60)", "raise OSError('Xid 79')"]
    return [sys.executable, "-S", "-c", [*lines, f"print({taken!r})"][index]]


def test_a_hung_gpu_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """CHECK-1, CHECK-2: a process to each device, killed in time; the others go on."""
    report = check_node(gpu_machine(monkeypatch, 4), probe_of)
    assert list(states(report).values())[1:] == ["ok", "timeout", "failed", "failed"], report.text()
    assert "Xid 79" in report.checks[3].message
    assert not [line for line in ps() if "time.sleep(60)" in line and "-S" in line]
    none = check_node(gpu_machine(monkeypatch, 0))
    assert none.checks[-1] == Check("gpu", "failed", "no GPU is visible")


def ps() -> list[str]:
    found = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    return [text.replace(b"\0", b" ").decode(errors="replace") for text in found]


def test_what_a_probe_saw() -> None:
    """CHECK-1: a product that is not finite fails."""
    assert judge(SEEN, made())[0]
    assert not judge(SEEN | {"finite": False}, made())[0]


def test_a_hung_check_holds_no_other_up() -> None:
    """CHECK-2: the checks that answer are there, in order."""
    looks: list[Any] = [lambda: (True, ""), lambda: time.sleep(30), lambda: (False, "no")]
    parts = [checks.Part(name, look) for name, look in zip("abc", looks, strict=True)]
    found = checks.side_by_side(parts, 0.3)
    assert [check.state for check in found] == ["ok", "timeout", "failed"]


def test_nodes_of_a_job(tmp_path: Path) -> None:
    """CHECK-2: a report for each host of the job, silent ones too; lists that sbatch and `exclude` read."""
    good = NodeReport("n2", 1.0, "cpu", [Check("disk", "ok", "")])
    bad = NodeReport("n3", 1.0, "cpu", [Check("disk", "failed", "")])
    lines = [json.dumps(report.json()) for report in (bad, good)]
    pieces = [
        f" {task}: {line[start : start + 40]}"
        for start in range(0, 400, 40)
        for task, line in enumerate(lines)
    ]
    output = "\n".join(["slurm: a line of another", " 0: a banner", *pieces])
    reports = allocation.arrange(["n1", "n2", "n3"], output, Check("answer", "timeout", "silent"), "cpu")
    assert [report.checks[0].state for report in reports] == ["timeout", "ok", "failed"]
    allocation.write_lists(reports, tmp_path)
    assert expand((tmp_path / "passing_nodes.txt").read_text().strip()) == ["n2"]
    assert (tmp_path / "failing_nodes.txt").read_text() == "n1,n3\n"
    taken = launched(base(), exclude=f"@{tmp_path}/failing_nodes.txt")
    assert resolve(taken).launcher.exclude == "n1,n3"
    allocation.write_lists(reports[1:2], tmp_path)
    assert resolve(taken).launcher.exclude is None
    with pytest.raises(UserError, match="gone cannot be read"):
        resolve(launched(base(), exclude="@/gone"))
    with pytest.raises(UserError, match="start it by salloc"):
        allocation.hosts_of({})


def test_the_step_of_all_nodes_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CHECK-2: what the report says where srun itself fails is how srun ended, not that time ran out."""
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\nexit 7\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    reports = allocation.check_nodes(made(), [])
    assert [report.node for report in reports] == ["n1", "n2"]
    assert reports[0].checks[0] == Check("answer", "failed", "no report; srun ended with code 7")


def test_before_ranks(tmp_path: Path) -> None:
    """CHECK-1: `info` says what is wrong, `strict` refuses with 3, `none` does not look."""
    said: list[str] = []
    wrong = made(tmp_path, shm="9000TiB", disk="0B")
    check_before_ranks(wrong, tmp_path, 0, said.append)
    assert (said, list(tmp_path.glob("checks.*"))) == ([], [])
    check_before_ranks(launched(wrong, checks="info"), tmp_path, 0, said.append)
    assert ["shm: failed" in line for line in said] == [True]
    assert json.loads((tmp_path / "checks.0.json").read_text())["passed"] is False
    with pytest.raises(UserError, match=r"launcher\.checks=strict") as caught:
        check_before_ranks(launched(wrong, checks="strict"), tmp_path, 0, said.append)
    assert caught.value.code == 3


@pytest.mark.gpu
def test_a_real_gpu(tmp_path: Path) -> None:
    """CHECK-1: a card passes, and says what it is; other tests may be using it."""
    config = made(tmp_path, probe="60s", device_memory="1TiB")
    report = check_node(replace(config, platform=replace(config.platform, name="cuda")))
    found = next(check for check in report.checks if check.name == "gpu 0")
    assert found.state == "ok", found
    assert "GiB" in found.message


def test_in_a_container_torch_is_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """CHECK-1: a host without torch cannot look at a GPU, and need not."""
    for module in (checks, node_facts):
        monkeypatch.setattr(module, "package_version", lambda name: None)
    config = gpu_machine(monkeypatch, 2)
    assert states(check_node(replace(config, container=BOXED)))["gpu"] == "ok"
    assert node_facts.packages(replace(config, container=BOXED))[0]
    assert not node_facts.packages(made())[0]


@pytest.mark.slow
def test_script(tmp_path: Path) -> None:
    """CHECK-2: one JSON object a line with the same keys; exit 3 where something is wrong."""
    command = [
        sys.executable,
        str(CHECKOUT / "scripts/doctor.py"),
        "--json",
        "platform.thresholds.shm=9000TiB",
    ]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    record = json.loads(done.stdout)
    assert sorted(record) == ["checks", "node", "passed", "platform", "schema", "time"]
    assert [check["name"] for check in record["checks"]] == NAMES
