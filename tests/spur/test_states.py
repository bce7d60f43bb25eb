"""How jobs of Spur stand, and who notices what: the queue, signs of life, records, places (SPUR, DIRECT)."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from src.compose import compose
from src.config import Config, LauncherConfig
from src.errors import UserError
from src.launchers import batch, node, places, spur, spur_batch, spur_capabilities
from src.launchers.beats import Beating, Listener, await_agents, sign
from src.launchers.scheduler import Seen, seconds_of
from src.launchers.spur import Spur
from src.launchers.spur_capabilities import of_version
from src.launchers.watch import Signals
from src.status import Status
from tests.slurm.conftest import wait_for

SPUR = Config(launcher=LauncherConfig("spur"))


def squeue(monkeypatch: pytest.MonkeyPatch, text: str, code: int = 0) -> list[tuple[str, ...]]:
    asked: list[tuple[str, ...]] = []

    def answer(*command: str) -> Any:
        asked.append(command)
        return subprocess.CompletedProcess(command, code, text, "")

    monkeypatch.setattr(spur, "ask", answer)
    return asked


def test_looking_at_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPUR-6: numbers only, for anything else would list all jobs; a preempted job waits again."""
    asked = squeue(monkeypatch, "4|PREEMPTED|None\n10|RUNNING|None\n")
    assert Spur().look(["10", "4", "x", "4"]) == {
        "4": Seen("PENDING", "PREEMPTED"),
        "10": Seen("RUNNING", "None"),
    }
    assert asked == [("squeue", "-h", "-t", "all", "-j", "4,10", "-o", "%i|%T|%r")]
    assert Spur().look(["without an id"]) == {}
    assert len(asked) == 1
    squeue(monkeypatch, "", code=1)
    assert Spur().look(["4"]) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("UNLIMITED", None),
        ("0:00", 0),
        ("5:07", 307),
        ("2:05:07", 7507),
        ("1-02:05:07", 93907),
        ("", None),
        ("7", None),
    ],
)
def test_clocks_of_squeue(text: str, seconds: int | None) -> None:
    """SPUR-5: the limit that the job really has, its partition's too."""
    assert seconds_of(text) == seconds


def test_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPUR-5: limit less what is used; None where there is none."""
    squeue(monkeypatch, "1:00:00|0:30\n")
    assert Spur().time_left("3") == 3570
    squeue(monkeypatch, "UNLIMITED|0:30\n")
    assert Spur().time_left("3") is None
    assert Spur().time_left("") is None


def test_submission_is_refused_with_the_words_of_sbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPUR-7, EXIT: success is an id, not a code."""
    squeue(monkeypatch, "weather\n")
    with pytest.raises(UserError, match="sbatch did not take the job: weather") as refused:
        spur.submit(tmp_path / "job.sh")
    assert refused.value.code == 5


def test_requeue_of_old_and_later_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPUR-5: up to 0.8.0 `scontrol requeue` cancels, so the script is submitted again, with a new id."""
    (tmp_path / "job.json").write_text('{"worker": "w", "id": "3"}')
    asked = squeue(monkeypatch, "4\n")
    monkeypatch.setattr(spur_capabilities, "said", lambda *words: "Commands:\n  requeue")
    assert Spur().requeue(tmp_path, "3")
    assert json.loads((tmp_path / "job.json").read_text()) == {"worker": "w", "id": "4"}
    monkeypatch.setattr(spur_capabilities, "said", lambda *words: "Commands:\n  requeue\n  requeuehold")
    assert Spur().requeue(tmp_path, "4")
    assert [command[0:2] for command in asked] == [("sbatch", "--parsable"), ("scontrol", "requeue")]


def test_silence_is_told_from_an_end(tmp_path: Path) -> None:
    """SPUR-5: a sign that stays as it is for the limit is silence, unless its node left a record."""
    now = [0.0]
    listener = Listener(tmp_path, lambda: now[0])
    for who in ("0", "1", "batch"):
        sign(tmp_path, who, 1)
    assert listener.silent(5.0) == []
    now[0] = 6.0
    sign(tmp_path, "0", 2)
    assert listener.silent(5.0) == ["1", "batch"]
    assert listener.is_anybody_there(5.0)
    (tmp_path / "node.1.json").write_text('{"node": 1, "time": 1.0, "codes": {}, "code": 0}')
    assert listener.silent(5.0) == ["batch"]
    (tmp_path / "node.0.json").write_text('{"node": 0, "time": 1.0, "codes": {}, "code": 0}')
    assert not listener.is_anybody_there(5.0)
    await_agents(tmp_path, 5.0)


def test_node_ends_when_another_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPUR-5: who gives no sign is named; so is an attempt that took the run over."""
    monkeypatch.setattr("src.launchers.beats.BEAT", 0.01)
    (tmp_path / "control").mkdir()
    (tmp_path / "config.yaml").touch()
    sign(tmp_path / "control", "1", 1)
    sign(tmp_path / "control", "batch", 1)
    with Beating(tmp_path, "0", 0.05) as beating:
        wait_for(lambda: beating.lost() is not None, 2)
    assert beating.lost() == "node 1 and the batch shell gave no sign for 0 s"
    (tmp_path / "control" / "beat.1").unlink()
    (tmp_path / "control" / "beat.batch").unlink()
    with Beating(tmp_path, "0", 9.0) as other:
        (tmp_path / "attempts" / "0001").mkdir(parents=True)
        (tmp_path / "attempts" / "0001" / "config.yaml").touch()
        wait_for(lambda: other.lost() is not None, 2)
    assert other.lost() == "another attempt at this run has begun"


def test_record_of_an_agent_stays_in_its_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPUR-5, AGENT-4: an agent whose run was taken over leaves no failure in the new attempt."""
    (tmp_path / "control").mkdir()
    (tmp_path / "config.yaml").touch()
    monkeypatch.setattr(node, "load_config", lambda path: SPUR)

    def lost(*words: object) -> None:
        (tmp_path / "attempts" / "0001").mkdir(parents=True)
        (tmp_path / "attempts" / "0001" / "config.yaml").touch()
        raise UserError("another attempt at this run has begun", code=5)

    monkeypatch.setattr(node, "run_ranks", lost)
    assert node.settle_node(tmp_path, node.Place(0, 1, "localhost"), Signals()) == 5
    assert list((tmp_path / "control").iterdir()) == []


def test_other_nodes_hold_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPUR-4: a node's share is kept while the job waits and runs, and given back at its end or requeue."""
    states = iter(["queued", "running", "running", "queued"])
    monkeypatch.setattr(spur_batch, "read_status", lambda run: {"state": next(states)})
    monkeypatch.setattr(spur_batch.time, "sleep", lambda seconds: None)
    assert spur_batch.hold(tmp_path) == 0
    assert next(states, None) is None
    monkeypatch.setattr(spur_batch, "read_status", lambda run: {"state": "failed"})
    assert spur_batch.hold(tmp_path) == 0


def test_codes_of_spur_mean_nothing(tmp_path: Path) -> None:
    """SPUR-7: with the records of all nodes srun's code is not asked; without them it is all there is."""
    (tmp_path / "control").mkdir()
    (tmp_path / "plan.json").write_text('{"nodes": 2}')
    for number in range(2):
        assert batch.step_code(tmp_path, SPUR, 143) == 143
        record = {"node": number, "time": 1.0, "codes": {str(number): 0}, "killed": False, "code": 0}
        (tmp_path / "control" / f"node.{number}.json").write_text(json.dumps(record))
    assert batch.step_code(tmp_path, SPUR, 143) == 0
    assert batch.step_code(tmp_path, replace(SPUR, launcher=LauncherConfig("slurm")), 143) == 143
    status = Status("running", 1, "")
    batch.settle_nodes(status, tmp_path, 0, world=2)
    assert status.state == "done"


STEP = {
    "SPUR_STEP_ID": "1",
    "SPUR_STEP_NUM_TASKS": "4",
    "SPUR_NNODES": "2",
    "SPUR_PROCID": "3",
    "SPUR_LOCALID": "1",
}
STEP |= {"SPUR_JOB_ID": "40", "SPUR_JOB_NODELIST": "n1,n2", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
STEP |= {"MASTER_ADDR": "n9", "MASTER_PORT": "29500", "SPUR_TASKS_PER_NODE": "1(x2)"}


def test_places_in_a_step_of_spur() -> None:
    """DIRECT: what Spur injects for torch is ignored; one task, or a batch shell, is an ordinary launch."""
    found = places.recognise(STEP)
    assert found is not None
    assert (found.source, found.rank, found.tasks, found.local_rank, found.nodes) == (
        "srun of Spur",
        3,
        4,
        1,
        2,
    )
    assert (found.address, found.port) == ("n1", 12047)
    config = compose(["data=synthetic", "mesh=pp2ep2"]).config
    assert places.role(found, config) == "rank"
    assert places.recognise({**STEP, "SPUR_STEP_NUM_TASKS": "1"}) is None
    assert places.recognise({k: v for k, v in STEP.items() if k != "SPUR_STEP_ID"}) is None
    with pytest.raises(UserError, match="SPUR_LOCALID missing beside the other variables of srun of Spur"):
        places.recognise({k: v for k, v in STEP.items() if k != "SPUR_LOCALID"})
    inner = places.recognise({**STEP, "TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "RANK": "2"})
    assert inner is not None
    assert inner.source == "torchrun"
    agents = places.recognise({**STEP, "SPUR_STEP_NUM_TASKS": "2", "SPUR_PROCID": "1"})
    assert agents is not None
    assert places.role(agents, config) == "node"


def test_inside_of_a_job_nothing_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """DIRECT-5: exit 2 names the job."""
    monkeypatch.setattr(spur_capabilities, "probe", lambda: of_version("0.8.0"))
    monkeypatch.setenv("SPUR_JOB_ID", "7")
    with pytest.raises(UserError, match="launcher=spur inside of job 7") as refused:
        Spur().need()
    assert refused.value.code == 2
