"""Jobs of a real Slurm whose agents run in a real podman (CONT, SLURM)."""

from __future__ import annotations

import json
import sys

import pytest

from tests.launchers.podman import limits, missing
from tests.slurm.conftest import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.podman, pytest.mark.slow, pytest.mark.timeout(180)]


def test_two_nodes_in_containers(cluster: Cluster) -> None:
    """CONT-2, EXIT-1, AGENT-2: containers that meet and keep a rank's code; one saves before its limit."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    args = ",".join(f'"{word}"' for word in limits())
    boxed = ["container=podman", "container.image=/:O", f"container.python={sys.executable}"]
    boxed += [f"container.args=[{args}]", "mesh=ep2", "launcher.nodes=2"]
    cluster.job("boxed", *boxed, "+env.FAKE_FAIL=1:exit42@2")
    alone = [word for word in boxed if not word.startswith(("mesh=", "launcher.nodes="))]
    short = ["launcher.time=2m", "launcher.grace=90s", "launcher.max_requeues=0", "max_steps=4000"]
    cluster.job("limited", *alone, *short, "+env.FAKE_SLEEP=0.05")
    code, text = cluster.end("boxed")
    assert code == 42, text
    assert cluster.status("boxed")["first_failing_rank"] == 1
    code, text = cluster.end("limited")
    assert code == 75, text
    assert (cluster.run("limited") / "control" / "stop").read_text() == "launcher.time=2m\n"
    plan = json.loads((cluster.run("boxed") / "plan.json").read_text())
    assert plan["container"]["runtime"] == "podman"
    logs = {path.name for path in (cluster.run("boxed") / "ranks").iterdir()}
    assert logs >= {"node_00000.log", "node_00001.log", "rank_00000.log", "rank_00001.log"}


def test_doctor_of_an_allocation(cluster: Cluster) -> None:
    """CHECK-2: a report of each node by one step of srun, and the lists."""
    folder = cluster.folder / "doctor"
    folder.mkdir()
    words = [sys.executable, "scripts/doctor.py", "--nodes", "--json", "--out", str(folder), "platform=cpu"]
    cluster.start("doctor", "salloc", "-N", "2", "-n", "2", "--quiet", *words, "platform.thresholds.disk=0B")
    code, text = cluster.end("doctor")
    assert code == 0, text
    records = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert [record["node"] for record in records] == ["n1", "n2"]
    assert (folder / "passing_nodes.txt").read_text() == "n1,n2\n"
    assert (folder / "failing_nodes.txt").read_text() == ""
