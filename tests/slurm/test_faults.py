"""The fault table on a real Slurm, all at once: each ends in time, with its reason, and can go on (AGENT-3).

Node n3 belongs to this module: it is preempted, and fails.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from src.records import read_json, read_steps
from tests.slurm.conftest import Cluster, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(300)]
FOR_EVER = ("max_steps=9000", "+env.FAKE_SLEEP=0.1")


def step_of(cluster: Cluster, name: str) -> int:
    try:
        return int((cluster.run(name) / "fake_step").read_text())
    except (OSError, ValueError):
        return 0


def state_of(cluster: Cluster, name: str) -> str:
    command = ["squeue", "-h", "-t", "all", "-j", str(cluster.id(name)), "-o", "%T"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def restart(cluster: Cluster, name: str, held: float = 3.0) -> None:
    """Spare the two minutes that a requeued job is held; sooner than `held` seconds it would be killed."""
    wait_for(lambda: step_of(cluster, name), 90)
    wait_for(lambda: state_of(cluster, name) == "PENDING", 90)
    time.sleep(held)
    subprocess.run(["scontrol", "update", f"JobId={cluster.id(name)}", "StartTime=now"], check=True)


def attempt_of(cluster: Cluster, name: str) -> int:
    return int(cluster.status(name).get("attempt", 0))


def agent_of(cluster: Cluster, name: str, rank: int) -> int:
    """The process that started a rank."""
    pid = rank_pid(cluster, name, rank)
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def rank_pid(cluster: Cluster, name: str, rank: int) -> int:
    return int((cluster.run(name) / "ranks" / f"rank_{rank:05d}.log").read_text().split()[3])


def is_gone(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True


def lose_nodes(cluster: Cluster) -> None:
    """Preempt both jobs of n3; later take the node away under the one that came back."""
    wait_for(lambda: step_of(cluster, "again") and step_of(cluster, "gone"), 90)
    words = ["sbatch", "-p", "high", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 2"]
    subprocess.run(words, check=True, cwd=cluster.folder)
    restart(cluster, "again")
    wait_for(lambda: attempt_of(cluster, "again") == 2, 90)
    here = step_of(cluster, "again")
    wait_for(lambda: step_of(cluster, "again") > here, 60)
    subprocess.run(["scontrol", "update", "NodeName=n3", "State=DOWN", "Reason=test"], check=True)
    restart(cluster, "again", held=10)  # Until the node is rid of what ran there; it comes back by itself.


def keep_going(cluster: Cluster) -> None:
    """Spare the job with a time limit its waits, as often as it needs several attempts."""
    over = cluster.started["limit"].poll
    wait_for(lambda: step_of(cluster, "limit"), 90)
    while over() is None:
        before = attempt_of(cluster, "limit")
        wait_for(lambda: cluster.status("limit").get("state") == "queued" or over() is not None, 90)
        if over() is None:
            restart(cluster, "limit")
            wait_for(lambda before=before: attempt_of(cluster, "limit") > before or over() is not None, 90)


def kill(cluster: Cluster) -> None:
    """End an agent, and a launching process, as the kernel would."""
    wait_for(lambda: step_of(cluster, "agent"), 90)
    os.kill(agent_of(cluster, "agent", 1), signal.SIGKILL)
    wait_for(lambda: step_of(cluster, "orphan"), 90)
    cluster.started["orphan"].kill()


def sweep_words(cluster: Cluster) -> list[str]:
    """A sweep of two seeds over two nodes, whose jobs are to build data that cannot be built."""
    (cluster.folder / "bad.txt").write_bytes(b"text \xff" * 100)
    words = [sys.executable, "-m", "tests.slurm.sweeping", "data=text_files", "tokenizer=bytes"]
    words += [f"data.files=[{cluster.folder}/bad.txt]", "data.holdout=0", "evaluation=none", "max_steps=2"]
    words += [f"paths.data={cluster.folder}/data", f"paths.runs={cluster.folder}/runs", "seed=0,1"]
    return [*words, "sweep.name=unbuilt", "data.prepare.where=job", "mesh=ep2", "launcher.nodes=2"]


@pytest.fixture(scope="module")
def faulty(cluster: Cluster) -> Cluster:
    """Every case, started together."""
    limited = ("launcher.time=2m", "launcher.grace=95s", "launcher.max_requeues=3")
    cluster.job("limit", *limited, "mesh=ep2", "launcher.nodes=2", "max_steps=80", "+env.FAKE_SLEEP=0.6/0.01")
    cluster.job("again", "max_steps=80", "+env.FAKE_SLEEP=0.5/0.3/0.01", "launcher.partition=again")
    cluster.job("gone", *FOR_EVER, "launcher.partition=gone")
    cluster.job("agent", *FOR_EVER, "mesh=ep2", "launcher.nodes=2", "+env.FAKE_PATIENCE=60")
    cluster.job("orphan", "max_steps=60", "+env.FAKE_SLEEP=0.1")
    cluster.start("unbuilt", *sweep_words(cluster))
    works = (lose_nodes, kill, keep_going)
    threads = [threading.Thread(target=work, args=(cluster,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for name in ("limit", "again", "gone", "agent", "orphan", "unbuilt"):
        cluster.end(name)
    for thread in threads:
        thread.join(timeout=60)
    return cluster


def assert_each_step_once(cluster: Cluster, name: str, steps: int) -> None:
    found = [int(record["step"]) for record in read_steps(cluster.run(name) / "metrics.jsonl")]
    assert found == list(range(1, steps + 1))


def test_time_limit(faulty: Cluster) -> None:
    """SLURM-3, SUB-4, AGENT-2: saved before the limit, queued again, gone on with, each step once."""
    code, text = faulty.end("limit")
    assert (code, faulty.status("limit")["state"]) == (0, "done"), text
    first = read_json(faulty.run("limit") / "attempts" / "0001" / "status.json") or {}
    assert (first["state"], first["last_step"] < 80) == ("queued", True)
    assert (faulty.run("limit") / "attempts" / "0001" / "control" / "requeued").exists()
    assert_each_step_once(faulty, "limit", 80)


def test_preemption_and_a_lost_node(faulty: Cluster) -> None:
    """AGENT-3, SLURM-4: preempted it saves, waits to be killed and comes back; a node that fails as well."""
    code, text = faulty.end("again")
    assert (code, faulty.status("again")["state"], attempt_of(faulty, "again")) == (0, "done", 3), text
    assert_each_step_once(faulty, "again", 80)
    attempts = faulty.run("again") / "attempts"
    assert (attempts / "0001" / "control" / "requeue").exists()
    assert not (attempts / "0001" / "control" / "requeued").exists()


def test_preempted_for_good(faulty: Cluster) -> None:
    """SLURM-2: PREEMPTED with a save is 75, and the same command would go on."""
    code, text = faulty.end("gone")
    status = faulty.status("gone")
    assert (code, status["state"], status["reason"]["type"]) == (75, "stopped", "PREEMPTED"), text
    assert status["last_step"] == step_of(faulty, "gone")


def test_a_killed_agent(faulty: Cluster) -> None:
    """ELA-3, EXIT: its rank goes with it, the other node is ended, 137, and nothing is left running."""
    code, text = faulty.end("agent")
    status = faulty.status("agent")
    assert (code, status["state"]) == (137, "failed"), text
    assert "killed by signal 9" in status["reason"]["message"]
    assert all(is_gone(rank_pid(faulty, "agent", rank)) for rank in (0, 1))


def test_a_killed_launching_process(faulty: Cluster) -> None:
    """LOCAL-2, SLURM-3: the job does without it, and its end is in `status.json`."""
    wait_for(lambda: faulty.status("orphan").get("state") == "done", 60)
    assert faulty.status("orphan")["exit_code"] == 0


def test_data_that_no_job_can_build(faulty: Cluster) -> None:
    """PREP-3, LEASE-6: one build fails; both jobs end with its reason and 4, on all their nodes."""
    code, text = faulty.end("unbuilt")
    assert code == 4, text
    records = list((faulty.folder / "data" / "tokens").glob("*.d/attempts/*.json"))
    assert len(records) == 1
    for seed in (0, 1):
        run = faulty.run("unbuilt") / f"seed-{seed}"
        status = read_json(run / "status.json") or {}
        assert (status["state"], status["exit_code"]) == ("failed", 4)
        assert "bad.txt" in status["reason"]["message"]
        nodes = [json.loads(path.read_text()) for path in (run / "control").glob("node.*.json")]
        assert [node["code"] for node in nodes] == [4, 4]
