"""Commands on a fake Spur whose jobs really run, all at once, for most of their time is waiting (FAKE-2)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from src.code_identity import CHECKOUT
from src.records import read_json, read_steps
from tests.slurm.conftest import TINY, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
BIN = CHECKOUT / "tests" / "fakes" / "bin"
LONG = {"FAKE_SLEEP": "0.1", "FAKE_PATIENCE": "99"}
TWO_NODES = ("mesh=ep2", "launcher.nodes=2", "max_steps=900", "launcher.watchdog=6s")
SECRET = "hf_nobody_may_see_this"


@dataclass
class Place:
    """Commands that were started on one Spur; what goes wrong there is each command's own."""

    folder: Path
    started: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def start(
        self,
        name: str,
        *words: str,
        launcher: str = "spur",
        version: str = "0.8.0",
        module: str = "",
        **environment: str,
    ) -> None:
        """Start `train.py`, or a module with ranks that train nothing; its output goes to `<name>.log`."""
        command = ["-m", module] if module else [str(CHECKOUT / "train.py")]
        known = {
            "PATH": f"{BIN}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(CHECKOUT),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "FAKE_SPUR": str(self.folder / "spur"),
            "FAKE_SPUR_FIRST": str(os.getpid() % 15000),
            "FAKE_SPUR_VERSION": version,
            "XDG_CACHE_HOME": str(self.folder / "cache" / name),
            "HF_TOKEN": SECRET,
        }
        with (self.folder / f"{name}.log").open("w") as log:
            self.started[name] = subprocess.Popen(
                [sys.executable, *command, f"launcher={launcher}", f"paths.runs={self.folder}/runs", *words],
                cwd=CHECKOUT,
                env={**os.environ, **known, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def fake(self, name: str, *words: str, **environment: str) -> None:
        """Start one job whose ranks train nothing."""
        words = (*words, "data=synthetic", *([] if "run_name" in str(words) else [f"run_name={name}"]))
        self.start(name, *words, module="tests.slurm.launching", **environment)

    def run(self, name: str) -> Path:
        """The run's directory."""
        return self.folder / "runs" / name

    def status(self, name: str) -> dict[str, Any]:
        """The run's `status.json`."""
        return read_json(self.run(name) / "status.json") or {}

    def job(self, name: str) -> str:
        """The id of the run's job."""
        return str((read_json(self.run(name) / "job.json") or {})["id"])

    def step(self, name: str) -> int:
        """The last step of ranks that train nothing."""
        file = self.run(name) / "fake_step"
        return int(file.read_text() or 0) if file.exists() else 0

    def end(self, name: str) -> tuple[int, str]:
        """Code and output of a command, at its end."""
        code = self.started[name].wait(timeout=200)
        return code, (self.folder / f"{name}.log").read_text()


def processes_of(run: Path) -> list[int]:
    """Agents and ranks of a run that are alive."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if str(run) in words and {"src.launchers.node", "tests.launchers.fake_worker"} & {*words}:
            found.append(int(path.parent.name))
    return found


def agent_of(run: Path, node: int) -> int:
    """The agent of one node."""
    for number in processes_of(run):
        variables = Path(f"/proc/{number}/environ").read_bytes().decode().split("\0")
        is_agent = "src.launchers.node" in Path(f"/proc/{number}/cmdline").read_bytes().decode()
        if is_agent and f"SPUR_PROCID={node}" in variables:
            return number
    raise AssertionError(f"no agent of node {node}")


def attach(place: Place) -> None:
    """The same command again, once the first has ended without waiting; it cancels what it follows."""
    assert place.end("detached")[0] == 0
    place.fake("attached", "max_steps=900", "run_name=detached", "launcher.time=1h")
    wait_for(lambda: "submitted before" in (place.folder / "attached.log").read_text(), 120)
    place.started["attached"].send_signal(signal.SIGINT)


def stop(place: Place, name: str) -> None:
    """Ask the ranks to save, which these do without leaving a checkpoint."""
    wait_for(lambda: place.step(name), 120)
    (place.run(name) / "checkpoints" / "step-00000001").mkdir(parents=True)
    (place.run(name) / "control" / "stop").write_text("the test\n")


def press(place: Place, name: str) -> None:
    """Ctrl-C, and once more where the job does not end."""
    wait_for(lambda: place.step(name), 120)
    place.started[name].send_signal(signal.SIGINT)
    if name == "deaf":
        wait_for(lambda: "cancelling job" in (place.folder / "deaf.log").read_text())
        time.sleep(1.5)
        place.started["deaf"].send_signal(signal.SIGINT)


def kill(place: Place) -> None:
    """Kill a node's agent, whose ranks go with it."""
    wait_for(lambda: place.step("lost"), 120)
    os.kill(agent_of(place.run("lost"), 1), signal.SIGKILL)


def interfere(place: Place) -> None:
    """Do to each run what its test is about, as soon as it is so far."""
    with ThreadPoolExecutor(8) as pool:
        doing = [pool.submit(attach, place), pool.submit(kill, place)]
        doing += [pool.submit(stop, place, name) for name in ("again", "anew")]
        doing += [pool.submit(press, place, name) for name in ("cancelled", "deaf")]
    for done in doing:
        done.result()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """All commands of this module, started together."""
    made = Place(tmp_path_factory.mktemp("spur"))
    real = [*(word for word in TINY if not word.startswith("max_steps")), "max_steps=5"]
    made.start("alone", *real, "run_name=alone", launcher="local")
    made.start("trained", *real, "run_name=trained", "mesh=pp2ep2", "launcher.nodes=2")
    made.fake(
        "failing", "mesh=pp2ep2", "launcher.nodes=2", "max_steps=9", version="0.7.0", FAKE_FAIL="3:exit42@2"
    )
    made.fake("lost", *TWO_NODES, version="later", **LONG)
    made.fake("cancelled", *TWO_NODES, FAKE_DEAF="1", **LONG)
    made.fake("again", "max_steps=30", version="later", **LONG)
    made.fake("anew", "max_steps=30", **LONG)
    made.fake("deaf", "max_steps=900", FAKE_SPUR_MODES="deaf", **LONG)
    made.fake(
        "detached", "max_steps=900", "launcher.wait=false", "launcher.time=1h", FAKE_SPUR_MODES="late", **LONG
    )
    sweep = ("data=synthetic", "seed=0,1,2", "launcher.parallel=1", "sweep.name=sweep", "max_steps=3")
    made.start("sweep", *sweep, module="tests.slurm.sweeping")
    try:
        interfere(made)
        yield made
    finally:
        for process in made.started.values():
            if process.poll() is None:
                process.kill()
                process.wait()
        for run in made.folder.glob("runs/*"):
            for number in processes_of(run):
                os.kill(number, signal.SIGKILL)


def test_two_nodes_have_the_losses_of_one_process(place: Place) -> None:
    """FAKE-2, DIRECT-4: 2 nodes x 2 ranks on pp2ep2."""
    for name in ("alone", "trained"):
        code, text = place.end(name)
        assert code == 0, text
    expected, found = (read_steps(place.run(name) / "metrics.jsonl") for name in ("alone", "trained"))
    assert [step["step"] for step in found] == [1, 2, 3, 4, 5]
    assert [step["loss"] for step in found] == pytest.approx([step["loss"] for step in expected], rel=1e-5)


def test_first_failure_is_told_where_each_node_runs_the_script(place: Place) -> None:
    """FAKE-2, SPUR-4: rank 3's 42 and its reason, from one world although every node runs the script."""
    code, text = place.end("failing")
    assert code == 42, text
    status = place.status("failing")
    assert (status["first_failing_rank"], status["exit_code"]) == (3, 42)
    assert sorted(path.name for path in (place.run("failing") / "ranks").iterdir()) == [
        f"rank_{rank:05d}.log" for rank in range(4)
    ]
    assert calls_of(place, "failing").count("srun") == 1


def test_lost_node_ends_the_others(place: Place) -> None:
    """SPUR-5: a node that is killed leaves no record; after `launcher.watchdog` the others end, naming it."""
    code, text = place.end("lost")
    assert code == 5, text
    assert "node 1 gave no sign for 6 s" in place.status("lost")["reason"]["message"]
    assert processes_of(place.run("lost")) == []


def test_cancelled_job_leaves_no_process(place: Place) -> None:
    """SPUR-5, 7: Spur kills the batch shell alone; ranks that hear nothing end when its signs are missing."""
    code, text = place.end("cancelled")
    assert code == 130, text
    assert place.status("cancelled")["state"] == "failed"
    wait_for(lambda: processes_of(place.run("cancelled")) == [], 20)


def test_cancelling_without_effect_is_not_taken_for_an_end(place: Place) -> None:
    """SPUR-7: scancel says nothing; the state does."""
    code, text = place.end("deaf")
    assert code == 130
    assert "was asked to end, it was RUNNING at last; not waiting for its end" in text


def test_requeue_keeps_the_job(place: Place) -> None:
    """SPUR-5, SLURM-4: where `scontrol requeue` works the job keeps its id."""
    code, text = place.end("again")
    assert code == 0, text
    assert (place.status("again")["attempt"], place.status("again")["last_step"]) == (2, 30)
    assert calls_of(place, "again").count("srun") == 2


def test_requeue_by_another_job(place: Place) -> None:
    """SPUR-5: up to 0.8.0 the run goes on as another job, and the command that waits follows it."""
    code, text = place.end("anew")
    assert code == 0, text
    assert (place.status("anew")["attempt"], place.status("anew")["last_step"]) == (2, 30)
    assert f"submit     job {place.job('anew')}" not in text
    assert f"job        {place.job('anew')} " in text
    assert calls_of(place, "anew").count("srun") == 1


def test_not_waiting_and_following_again(place: Place) -> None:
    """SLURM-6: the id is printed and the command ends; the same command follows that job."""
    code, text = place.end("detached")
    assert f"not waiting for job {place.job('detached')}" in text
    code, text = place.end("attached")
    assert code == 130, text
    assert f"job        {place.job('detached')} was submitted before: following it" in text


def test_sweep_is_throttled_here(place: Place) -> None:
    """SPUR-6: single jobs, `launcher.parallel` of them at the same time."""
    code, text = place.end("sweep")
    assert code == 0, text
    runs = sorted(
        path for path in (place.folder / "runs" / "sweep").iterdir() if (path / "status.json").exists()
    )
    spans = sorted((status["started"], status["ended"]) for status in map(status_of, runs))
    assert len(spans) == 3
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_no_secret_is_written(place: Place) -> None:
    """FAKE-2: a token of the shell is in no command, script, log, status or report."""
    for path in (path for path in place.folder.rglob("*") if path.is_file() and ".code" not in path.parts):
        assert SECRET.encode() not in path.read_bytes(), path


def status_of(run: Path) -> dict[str, Any]:
    return read_json(run / "status.json") or {}


def calls_of(place: Place, name: str) -> list[str]:
    """The commands of Spur that were called inside of a run's job."""
    calls = map(json.loads, (place.folder / "spur" / "calls.jsonl").read_text().splitlines())
    return [call["command"] for call in calls if call["env"].get("SPUR_JOB_ID") == place.job(name)]
