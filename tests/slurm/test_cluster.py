"""Commands on a real Slurm, all at once, for most of their time is waiting (SLURM, EXIT, DIRECT)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from src.code_identity import CHECKOUT
from src.launchers.hostlist import expand
from src.records import read_json, read_steps
from tests.launchers.secrets import found_in, named_in
from tests.slurm.conftest import TINY, Cluster, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(180)]
TWO_NODES = ("mesh=ep2", "launcher.nodes=2")
LONG = ("max_steps=900", "+env.FAKE_SLEEP=0.1")


def step_of(cluster: Cluster, name: str) -> int:
    try:
        return int((cluster.run(name) / "fake_step").read_text())
    except (OSError, ValueError):
        return 0


def bad_text(cluster: Cluster) -> Path:
    """A file that is no UTF-8."""
    path = cluster.folder / "bad.txt"
    path.write_bytes(b"text \xff" * 100)
    return path


def queue() -> str:
    return subprocess.run(["squeue", "-h"], capture_output=True, text=True).stdout


def interfere(cluster: Cluster) -> None:
    """Cancel one job, press Ctrl-C at two others, once they run; attach to the one that was left alone."""
    wait_for(lambda: step_of(cluster, "cancelled"))
    subprocess.run(["scancel", str(cluster.id("cancelled"))], check=True)
    for name in ("interrupted", "detached"):
        wait_for(lambda name=name: step_of(cluster, name))
        cluster.started[name].send_signal(signal.SIGINT)
    cluster.end("detached")
    cluster.job("attached", *LONG, "run_name=detached")
    wait_for(lambda: "submitted before" in (cluster.folder / "attached.log").read_text())
    cluster.started["attached"].send_signal(signal.SIGINT)


@pytest.fixture(scope="module")
def busy(cluster: Cluster) -> Cluster:
    """Every command of this module, started together."""
    train = [sys.executable, "train.py", *TINY, "data.shuffle_seed=3", "mesh=ep2"]
    cluster.start("trained", *train, "launcher=slurm", "launcher.nodes=2", *cluster.places("trained"))
    cluster.job("fine")
    cluster.job("code", *TWO_NODES, "+env.FAKE_FAIL=1:exit42@2")
    cluster.job("raised", *TWO_NODES, "+env.FAKE_FAIL=1:raise@2")
    cluster.job("killed", *TWO_NODES, "+env.FAKE_FAIL=1:kill@2")
    cluster.job("cancelled", *LONG)
    cluster.job("interrupted", *LONG)
    cluster.job("detached", *LONG, "launcher.on_interrupt=detach")
    sweep = [sys.executable, "-m", "tests.slurm.sweeping", "data=synthetic", "max_steps=4"]
    sweep += [f"paths.runs={cluster.folder}/runs", "sweep.name=swept", "seed=0,1,2", "mesh=single"]
    cluster.start("swept", *sweep, "+env.FAKE_FAIL=0:exit42@2", "+env.FAKE_FAIL_SEED=1")
    cluster.start("swept-dry", *sweep, "dry_run=true")
    bad = [
        sys.executable,
        "train.py",
        "launcher=slurm",
        "data=text_files",
        f"data.files=[{bad_text(cluster)}]",
    ]
    bad += ["tokenizer=bytes", f"paths.data={cluster.folder}/data", "evaluation=none", "data.holdout=0"]
    cluster.start("bad-data", *bad, *cluster.places("bad-data"))
    sweep[2:4] = ["tests.slurm.sweeping", *bad[3:]]
    sweep[sweep.index("sweep.name=swept")] = "sweep.name=bad-sweep"
    cluster.start("bad-sweep", *sweep)
    cluster.start("srun", "srun", "-n", "2", *train, *cluster.places("srun"))
    thread = threading.Thread(target=interfere, args=(cluster,), daemon=True)
    thread.start()
    for name in list(cluster.started):
        cluster.end(name)
    thread.join(timeout=60)
    cluster.end("attached")
    return cluster


def test_a_training_on_two_nodes(busy: Cluster) -> None:
    """PLAN-4, AGENT, RUN-6: trained from the snapshot, agents met over both nodes, done, code 0."""
    code, text = busy.end("trained")
    assert code == 0, text
    assert (busy.status("trained")["state"], busy.status("trained")["last_step"]) == ("done", 3)
    assert "3 steps" in text
    nodes = [json.loads(path.read_text()) for path in (busy.run("trained") / "control").glob("node.*.json")]
    assert sorted((node["node"], node["codes"]) for node in nodes) == [(0, {"0": 0}), (1, {"1": 0})]
    script = next((busy.run("trained") / "slurm").glob("*submission.sh")).read_text()
    (code_folder,) = re.findall(r"export PYTHONPATH=(\S+?)\"", script)
    assert (Path(code_folder) / "src" / "trainer" / "worker.py").is_file()
    assert Path(code_folder).parent == busy.folder / "runs" / ".code"
    assert (busy.run("trained") / "loss.png").is_file()


def test_srun_becomes_ranks_with_the_same_losses(busy: Cluster) -> None:
    """DIRECT-1, DIRECT-4, DIRECT-5: `srun -n 2` without a job of ours trains as the submitted one does."""
    code, text = busy.end("srun")
    assert code == 0, text
    losses = [
        [s["loss"] for s in read_steps(busy.run(name) / "metrics.jsonl")] for name in ("srun", "trained")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    assert busy.status("srun")["state"] == "done"


def test_success(busy: Cluster) -> None:
    """SLURM-2: no success without our `done`."""
    assert (busy.end("fine")[0], busy.status("fine")["state"]) == (0, "done")


@pytest.mark.parametrize(
    ("name", "code", "kind"),
    [("code", 42, "ExitCode"), ("raised", 1, "ValueError"), ("killed", 137, "Signal")],
)
def test_the_first_failing_rank_decides(busy: Cluster, name: str, code: int, kind: str) -> None:
    """EXIT-1, AGENT-4: code and reason are rank 1's, on the other node, whatever srun says."""
    found, text = busy.end(name)
    assert found == code, text
    status = busy.status(name)
    assert (status["state"], status["exit_code"], status["first_failing_rank"]) == ("failed", code, 1)
    assert status["reason"]["type"] == kind
    assert f"failed with code {code} on rank 1" in text


def test_the_traceback_of_a_far_rank_is_shown(busy: Cluster) -> None:
    """RANK-2: what was raised on the other node stands on this terminal."""
    assert "rank 1 failed:\nTraceback" in busy.end("raised")[1]


def test_scancel(busy: Cluster) -> None:
    """SLURM-2: CANCELLED stands, 143, and is not queued again."""
    code, text = busy.end("cancelled")
    assert code == 143, text
    status = busy.status("cancelled")
    assert (status["state"], status["exit_code"], status["reason"]["type"]) == ("failed", 143, "CANCELLED")


def test_ctrl_c_cancels(busy: Cluster) -> None:
    """SLURM-6: the job is cancelled and waited for; 130."""
    code, text = busy.end("interrupted")
    assert code == 130, text
    assert "cancelling job" in text
    assert busy.status("interrupted")["exit_code"] == 130
    assert "Ctrl-C" in busy.status("interrupted")["reason"]["message"]


def test_detach_and_the_same_command_again(busy: Cluster) -> None:
    """SLURM-6: detached, the job goes on; the same command follows it instead of submitting another."""
    code, text = busy.end("detached")
    assert (code, "goes on" in text) == (130, True), text
    again = busy.end("attached")[1]
    (number,) = re.findall(r"job +(\d+) was submitted before", again)
    assert f"submit     job {number} " in text
    assert busy.status("detached")["attempt"] == 1


def test_an_array_with_one_failure(busy: Cluster) -> None:
    """SLURM-5, SWEEP-3, EXIT-2: one array of three; the failed task has its code and stops no other."""
    code, text = busy.end("swept")
    assert code == 42, text
    directory = busy.folder / "runs" / "swept"
    assert len(list((directory / "slurm").glob("*submission.sh"))) == 1
    rows = {row["seed"]: row for row in json.loads((directory / "report.json").read_text())["runs"]}
    assert [rows[str(seed)]["state"] for seed in range(3)] == ["done", "failed", "done"]
    assert rows["1"]["exit_code"] == 42
    assert (directory / "loss.png").is_file()
    assert "| 1    | failed | 42 " in text


def script_in(folder: Path) -> str:
    """The one script that was submitted from a run's or a sweep's directory."""
    (path,) = (folder / "slurm").glob("*submission.sh")
    return path.read_text()


def test_a_dry_run_prints_what_is_submitted(busy: Cluster) -> None:
    """CFG-17, PLAN-4: byte for byte, of one job and of an array."""
    words = [sys.executable, "train.py", *TINY, "data.shuffle_seed=3", "mesh=ep2"]
    words += ["launcher=slurm", "launcher.nodes=2", *busy.places("trained"), "dry_run=true"]
    busy.start("trained-dry", *words)
    for name in ("trained", "swept"):
        code, text = busy.end(f"{name}-dry")
        assert code == 0, text
        script = script_in(busy.run(name))
        assert script.startswith("#!/bin/bash\n")
        assert f"{script}\nrun        " in text


def test_failed_data_is_in_the_runs_own_directory(busy: Cluster) -> None:
    """RUN-6, EXIT: 4 and the reason in `status.json` of a run and of each job; nothing is submitted."""
    assert busy.end("bad-data")[0] == 4
    assert busy.end("bad-sweep")[0] == 4
    jobs = sorted((busy.run("bad-sweep")).glob("seed-*"))
    assert len(jobs) == 3
    for path in (busy.run("bad-data"), *jobs):
        status = read_json(path / "status.json") or {}
        assert (status["state"], status["exit_code"], status["reason"]["type"]) == ("failed", 4, "UserError")
        assert "bad.txt" in status["reason"]["message"]
        assert status["ended"] is not None
        assert not (path / "slurm").exists()
    assert not (busy.run("bad-sweep") / "slurm").exists()


@pytest.mark.parametrize(
    "hosts",
    ["n1", "n[1-3]", "n[01-03]", "n[098-101]", "n[1,3-4]", "a[1-2],b7", "r[1-2]n[1-2]", "n1-ib,n2-ib"],
)
def test_host_lists_as_scontrol_expands_them(cluster: Cluster, hosts: str) -> None:
    """HOST: names and their order are scontrol's, which in 22.05 knows no suffix behind a bracket."""
    answer = subprocess.run(
        ["scontrol", "show", "hostnames", hosts], capture_output=True, text=True, check=True
    )
    assert expand(hosts) == answer.stdout.split()


def test_nothing_is_left(busy: Cluster) -> None:
    """The queue is empty, and nobody asked sacct."""
    wait_for(lambda: queue() == "", 30)
    assert not (busy.folder / "sacct-was-called").exists()


def test_no_secret_is_written_or_on_a_command_line(busy: Cluster) -> None:
    """CFG-16, ENV-3: scripts, plans, logs, status, reports and what anybody sees in the list of processes."""
    assert any("src.launchers.batch finish" in line for line in busy.lines.seen)
    assert found_in(busy.folder) == []
    assert named_in("\n".join(busy.lines.seen)) == []


def test_a_stopped_job_is_queued_again_and_scancel_is_not_undone(cluster: Cluster) -> None:
    """SLURM-3, SLURM-4: USR2 saves and requeues, the second attempt resumes; a cancelled one stays away."""
    words = [sys.executable, "train.py", "launcher=slurm", *TINY, "max_steps=3000", "checkpoint.every=5"]
    cluster.start("requeued", *words, *cluster.places("requeued"))
    wait_for(lambda: len(read_steps(cluster.run("requeued") / "metrics.jsonl")) > 5)
    number = str(cluster.id("requeued"))
    subprocess.run(["scancel", "--signal=USR2", number], check=True)
    wait_for(lambda: cluster.status("requeued").get("state") == "queued")
    state = ["squeue", "-h", "-j", number, "-o", "%T"]
    wait_for(lambda: subprocess.run(state, capture_output=True, text=True).stdout.strip() == "PENDING")
    time.sleep(3)
    subprocess.run(["scontrol", "update", f"JobId={number}", "StartTime=now"], check=True)
    wait_for(lambda: "goes on from step" in (cluster.folder / "requeued.log").read_text())
    assert cluster.status("requeued")["attempt"] == 2
    subprocess.run(["scancel", number], check=True)
    assert cluster.end("requeued")[0] == 143
    wait_for(lambda: queue() == "", 30)


def test_submission_is_quick(cluster: Cluster) -> None:
    """From the command to a job id in 6 s, most of it imports; the job sees the code as it was then."""
    begin = time.monotonic()
    cluster.job("quick", "launcher.wait=false")
    code, text = cluster.end("quick")
    assert (code, time.monotonic() - begin < 6) == (0, True), text
    assert f"not waiting for job {cluster.id('quick')}" in text
    wait_for(lambda: cluster.status("quick").get("state") == "done")
    assert "SLURM_CONF" in os.environ
    assert CHECKOUT.is_dir()
