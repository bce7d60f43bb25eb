"""What may go wrong around a launch on this machine, and what must never be seen of it (RANK-1, ENV-3)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from src import runs
from src.code_identity import CHECKOUT, code_record
from src.compose import compose, dump_config, load_config
from src.config import Config
from src.errors import UserError
from src.launchers import launch, node, storage
from src.launchers.node_data import LEASE, WORD, await_word
from src.launchers.ranks import rank_command
from src.launchers.watch import Signals, time_left
from src.records import read_json, read_steps, write_json
from src.status import Status
from src.trainer.data import failures
from src.trainer.data.lease import Lease
from tests.launchers.conftest import Start
from tests.launchers.secrets import SECRETS, CommandLines, found_in, named_in
from tests.launchers.test_launch import out, status, wait_for
from tests.slurm.conftest import TINY


@pytest.fixture(scope="module")
def config() -> Config:
    return compose(["data=synthetic", "platform=cpu"]).config


def test_storage_that_vanishes_and_a_time_limit(start: Start, tmp_path: Path, checkout: Path) -> None:
    """RUN-6: a run whose directory is gone ends at once with one line, and can go on when it is back.

    AGENT-2: `launcher.time` ends a launch here as a scheduler would: saved, 75.
    """
    words = ["max_steps=400", "+env.FAKE_SLEEP=0.1"]
    lost = start("launching", *words, "run_name=one", folder="lost")
    short = start("launching", *words, "run_name=two", "launcher.time=6s", "launcher.grace=5s")
    wait_for((tmp_path / "lost/one/fake_step").exists)
    (tmp_path / "lost").rename(tmp_path / "away")
    code, text = out(lost)
    assert code == 1, text
    assert "the run's files cannot be written" in text
    assert "Traceback" not in text
    code, text = out(short)
    assert (code, status(tmp_path / "runs/two")["state"]) == (75, "stopped"), text
    assert "launcher.time=6s: saving" in text
    (tmp_path / "away").rename(tmp_path / "lost")
    assert status(tmp_path / "lost/one")["state"] == "running"
    taken = runs.claim(load_config(tmp_path / "lost/one/config.yaml"), code_record(checkout), None)
    assert (taken.attempt, taken.finished) == (2, False)
    taken.release()


def test_storage_that_hangs(config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Law 6: exit 3 with the key that hangs, in time, before anything else is asked."""
    held = threading.Event()

    def exists(place: Path) -> bool:
        return held.wait(60) if place == tmp_path else True

    monkeypatch.setattr(storage.os.path, "exists", exists)
    monkeypatch.setattr(storage, "PATIENCE", 0.2)
    config = replace(config, paths=replace(config.paths, runs=str(tmp_path)))
    began = time.monotonic()
    with pytest.raises(UserError, match=r"paths\.runs: .* has not answered") as refused:
        storage.check_storage(config)
    assert (refused.value.code, time.monotonic() - began < 5) == (3, True)
    assert launch.run_one(config, []) == 3
    assert list(tmp_path.iterdir()) == []
    held.set()


def test_a_scheduler_signals_several_times_and_kills_by_itself() -> None:
    """AGENT-3: the second TERM of a preemption must not kill ranks that save; a second Ctrl-C does."""
    for scheduled in (False, True):
        signals = Signals(scheduled)
        signals.came = [signal.SIGTERM]
        assert not signals.insist
        signals.came += [signal.SIGTERM, signal.SIGTERM]
        assert signals.insist == (not scheduled)


def test_an_attempt_keeps_its_own_time(config: Config, tmp_path: Path) -> None:
    """AGENT-2, SUB-4: from the attempt's own start, in whole minutes where a scheduler limits it."""
    Status("running", 1, "", started=time.time() - 10).write(tmp_path)
    assert time_left(tmp_path, config) == float("inf")
    config = replace(config, launcher=replace(config.launcher, time="90s", grace="30s"))
    assert 49 < time_left(tmp_path, config) <= 50
    assert 79 < time_left(tmp_path, replace(config, launcher=replace(config.launcher, name="slurm"))) <= 80


@pytest.mark.parametrize("launcher", ["slurm", "spur", "local"])
def test_the_agent_of_a_job_sees_to_the_data_before_ranks(
    config: Config, launcher: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PREP-3: the agent of a submitted job asks for its data, and starts no rank if they cannot be built."""
    asked = []

    def ensure(run: Path, config: Config, number: int) -> None:
        asked.append(number)
        raise UserError("no data", code=4)

    monkeypatch.setattr(node, "ensure_data", ensure)

    def start(*_: object) -> None:
        raise RuntimeError("a rank starts")

    monkeypatch.setattr(node, "start", start)
    config = replace(config, launcher=replace(config.launcher, name=launcher))
    with pytest.raises(RuntimeError if launcher == "local" else UserError):
        node.watch_ranks(tmp_path, config, node.Place(0, 1, "n1", 7), Signals(), None, lambda: None)
    assert asked == ([] if launcher == "local" else [0])


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM])
def test_a_rank_that_is_still_importing_outlives_a_signal(number: int, tmp_path: Path) -> None:
    """SUB-4, AGENT-2: the scheduler's warning comes to every process, also before it has handlers."""
    (tmp_path / "ranks").mkdir()
    (tmp_path / "worker.py").write_text(
        "print('imports', flush=True)\nimport time\ntime.sleep(0.5)\nprint('done')\n"
    )
    environment = {"RANK": "3", "PYTHONPATH": str(tmp_path), "PATH": "/bin:/usr/bin"}
    process = subprocess.Popen(rank_command(tmp_path, "worker"), env=environment)
    log = tmp_path / "ranks" / "rank_00003.log"
    wait_for(lambda: log.exists() and "imports" in log.read_text())
    process.send_signal(number)
    assert process.wait(30) == 0
    assert log.read_text().endswith("done\n")


@pytest.mark.slow
def test_a_node_that_never_comes(config: Config, tmp_path: Path) -> None:
    """RANK-1: an agent waits `launcher.timeout` for the others, names them, and ends with 6."""
    launcher = replace(config.launcher, name="slurm", nodes=2, timeout="1s")
    config = replace(config, mesh=replace(config.mesh, ep=2, spec="ep2"), launcher=launcher)
    started = {}
    for alone in (0, 1):
        run = tmp_path / str(alone)
        for folder in ("control", "ranks"):
            (run / folder).mkdir(parents=True)
        (run / "config.yaml").write_text(dump_config(config))
        code = (
            "import sys, os; from pathlib import Path; from src.launchers import node; "
            "from src.launchers.watch import Signals; "
            f"place = node.Place({alone}, 2, '127.0.0.1', {77 + alone}); "
            "os._exit(node.settle_node(Path(sys.argv[1]), place, Signals()))"
        )
        started[alone] = subprocess.Popen([sys.executable, "-c", code, str(run)])
    for alone, process in started.items():
        assert process.wait(60) == 6
        record = read_json(tmp_path / str(alone) / "control" / f"node.{alone}.json") or {}
        words = f"nodes {1 - alone} did not come within launcher.timeout=1s; here are {alone} ("
        assert words in record["message"]


@pytest.mark.slow
def test_one_signalled_rank_stops_all(tmp_path: Path) -> None:
    """AGENT-2: a signal to one rank of two: both save after the same step and leave, the run ends with 75."""
    words = [*TINY, "max_steps=5000", "mesh=ep2", "platform=cpu", f"paths.runs={tmp_path}", "run_name=one"]
    command = [sys.executable, "train.py", *words, "checkpoint.every=4000"]
    process = subprocess.Popen(
        command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    run = tmp_path / "one"
    wait_for(lambda: len(read_steps(run / "metrics.jsonl")) > 3 or process.poll() is not None, 90)
    log = (run / "ranks" / "rank_00001.log").read_text()
    os.kill(int(log.split()[3]), signal.SIGUSR1)
    code, text = out(process)
    assert (code, status(run)["state"]) == (75, "stopped"), text
    (saved,) = (run / "checkpoints").glob("step-*")
    assert int(saved.name.partition("-")[2]) == status(run)["last_step"] < 4000


def test_a_builder_that_dies_or_never_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PREP-3: the other nodes end with what node 0 says, within the lease's patience if it says nothing."""
    with pytest.raises(UserError, match="began no preparation within 0 s") as refused:
        await_word(tmp_path, 0.0)
    assert refused.value.code == 6
    monkeypatch.setattr("src.trainer.data.lease.SILENCE_SECONDS", 0.3)
    lease = Lease.take(tmp_path / LEASE)
    assert lease is not None
    lease._stop.set()
    with pytest.raises(UserError, match="node 0 was lost") as refused:
        await_word(tmp_path, 60.0)
    assert refused.value.code == 4
    lease.release()
    write_json(tmp_path / WORD, {"code": 0, "key": "k"})
    assert await_word(tmp_path, 60.0)["key"] == "k"


def test_each_node_ends_with_the_first_nodes_reason(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PREP-3, LEASE-10: `where=job` fails everywhere with one reason; a store that is not shared is told."""
    (tmp_path / "control").mkdir()
    data = replace(config.data, kind="text_files", prepare=replace(config.data.prepare, where="job"))
    config = replace(config, data=data)
    found = ["k0"]

    def build(run: Path, config: Config) -> str:
        if found[0] == "bad":
            raise OSError("no such corpus")
        return found[0]

    monkeypatch.setattr("src.launchers.node_data.build", build)
    node.ensure_data(tmp_path, config, 0)
    node.ensure_data(tmp_path, config, 1)
    found[0] = "k1"
    with pytest.raises(UserError, match="gives data k1, that of node 0 k0"):
        node.ensure_data(tmp_path, config, 1)
    found[0] = "bad"
    for place in (0, 1):
        with pytest.raises(UserError, match="OSError: no such corpus") as refused:
            node.ensure_data(tmp_path, config, place)
        assert refused.value.code == 4
    data.prepare.where = "submit"
    node.ensure_data(tmp_path, config, 0)


def test_a_failed_build_is_not_tried_again_for_the_same_attempt(tmp_path: Path) -> None:
    """LEASE-6, LEASE-7: others of the attempt end with the reason, another attempt does not."""
    lease = tmp_path / "k.d" / "lease"
    lease.parent.mkdir()
    failures.check(lease, "sweep#1")
    with pytest.raises(ValueError, match="broken"), failures.recorded(lease, "sweep#1"):
        raise ValueError("broken")
    with pytest.raises(UserError, match=r"ValueError: broken .*sweep#1") as refused:
        failures.check(lease, "sweep#1")
    assert refused.value.code == 4
    for other in ("sweep#2", ""):
        failures.check(lease, other)


@pytest.mark.slow
def test_no_secret_is_written_or_on_a_command_line(start: Start, tmp_path: Path) -> None:
    """CFG-16, ENV-3: local runs, a sweep and its dry runs; files, output and all command lines meanwhile."""
    words = ["seed=0", "mesh=ep2", "max_steps=1"]
    with CommandLines() as lines:
        started = [
            start("sweeping", *words, **SECRETS),
            start("sweeping", *words, "dry_run=true", **SECRETS),
            start("sweeping", *words, "dry_run=true", "launcher=slurm", **SECRETS),
        ]
        said = [out(process) for process in started]
    assert [code for code, _ in said] == [0, 0, 0], said
    assert any("fake_worker" in line for line in lines.seen)
    assert [named_in(text) for _, text in said] == [[], [], []]
    assert found_in(tmp_path) == []
    assert named_in("\n".join(lines.seen)) == []
    (tmp_path / "leak").write_text(f"password: {SECRETS['HF_TOKEN']}")
    assert len(found_in(tmp_path)) == 1
