"""Pods: which node an environment names, what is refused, and two of them as one launch (DIRECT)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from src.code_identity import CHECKOUT
from src.config import Config, LauncherConfig, MeshConfig
from src.errors import UserError
from src.launchers import direct, places
from src.launchers.direct_store import await_records, key, open_store, send_records
from src.launchers.places import ORDINALS, Place, recognise, role
from src.records import read_json, read_steps

POD = {
    "MASTER_ADDR": "trainer-0.trainer",
    "MASTER_PORT": "29400",
    "NNODES": "2",
    "NODE_RANK": "1",
    "GPUS_PER_NODE": "4",
}
TINY = (
    "data=synthetic",
    "data.ids=48",
    "model.num_layers=2",
    "sequence_length=32",
    "evaluation=none",
    "max_steps=5",
)


def without(*names: str, **more: str) -> dict[str, str]:
    return {name: value for name, value in {**POD, **more}.items() if name not in names}


def test_a_pod_is_the_agent_of_its_node() -> None:
    """DIRECT: five variables name a node; a whole row of torchrun goes first, half of one does not."""
    expected = Place("a pod", 1, 2, 0, 1, 2, "trainer-0.trainer", 29400, per_node=4)
    assert recognise(POD) == expected
    assert recognise({**POD, "RANK": "1", "WORLD_SIZE": "2"}) == expected
    whole = recognise({**POD, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})
    assert whole is not None
    assert (whole.source, whole.rank) == ("torchrun", 5)
    assert recognise({"HOME": "/"}) is None


@pytest.mark.parametrize("missing", places.POD)
def test_a_partial_set_is_refused(missing: str) -> None:
    """DIRECT: never localhost instead; what is missing is named (2); inside of Slurm it is ignored."""
    with pytest.raises(UserError, match=f"{missing}: .*missing") as refused:
        recognise(without(missing))
    assert refused.value.code == 2
    with pytest.raises(UserError, match="missing"):
        recognise({missing: POD[missing]})
    if missing != "NODE_RANK":
        assert recognise(without(missing, SLURM_JOB_ID="7")) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"NODE_RANK": "2"}, "NODE_RANK=2, but NNODES=2"),
        ({"NODE_RANK": "-1"}, "'-1' is no whole number from 0 on"),
        ({"NNODES": "0"}, "'0' is no whole number from 1 on"),
        ({"GPUS_PER_NODE": "all"}, "'all' is no whole number"),
        ({"MASTER_PORT": "1023"}, "1023 is none of 1024 to 65535"),
        ({"MASTER_PORT": "65536"}, "65536 is none of 1024 to 65535"),
        ({"MASTER_PORT": "٣٠٠٠٠"}, "is no whole number"),
    ],
)
def test_values_out_of_range(change: dict[str, str], words: str) -> None:
    """DIRECT: rank ≥ nodes and ports of others are refused with both values (2)."""
    with pytest.raises(UserError, match=words):
        recognise({**POD, **change})


@pytest.mark.parametrize(
    ("source", "more", "rank"),
    [
        ("completion_index", {"JOB_COMPLETION_INDEX": "0"}, 0),
        ("hostname", {"HOSTNAME": "trainer-1.trainer.svc"}, 1),
        ("hostname", {"HOSTNAME": "trainer"}, None),
        ("completion_index", {}, None),
        ("NODE_RANK", {"JOB_COMPLETION_INDEX": "0"}, None),
    ],
)
def test_the_number_of_a_node_from_elsewhere(source: str, more: dict[str, str], rank: int | None) -> None:
    """DIRECT-3: a completion index or the end of the host's name, where `launcher.node_rank_from` says so."""
    shell = without("NODE_RANK", **more)
    if rank is None:
        with pytest.raises(UserError, match="NODE_RANK: missing beside"):
            recognise(shell, lambda: source)
        return
    found = recognise(shell, lambda: source)
    assert found is not None
    assert found.rank == rank
    (unasked,) = [recognise(POD, lambda: pytest.fail("asked though NODE_RANK is there"))]
    assert unasked is not None


def test_config_names_every_source() -> None:
    """DIRECT-3: the choices of the key are those that the table knows."""
    key = LauncherConfig.__dataclass_fields__["node_rank_from"]
    assert list(key.metadata["choices"]) == list(ORDINALS)


def test_ranks_of_pods_must_be_those_of_the_mesh() -> None:
    """PLAN-2: nodes × ranks against the mesh, with the arithmetic."""
    found = recognise(POD)
    assert found is not None
    assert role(found, Config(mesh=MeshConfig("pp2ep4", pp=2, ep=4))) == "node"
    with pytest.raises(UserError, match="NNODES=2 x GPUS_PER_NODE=4 = 8 ranks, mesh=ep2 has 2"):
        role(found, Config(mesh=MeshConfig("ep2", ep=2)))


def test_an_address_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    """ELA-5, AGENT-1: exit 6 at once with the name, before torch looks for minutes."""

    def unknown(host: str, port: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = recognise(POD)
    assert found is not None
    with pytest.raises(UserError, match=r"first host trainer-0\.trainer does not resolve") as refused:
        direct.run_direct(found, [])
    assert refused.value.code == 6


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_records_reach_another_disk(tmp_path: Path) -> None:
    """DIRECT-1: no shared file system is needed; what the first node has already stays."""
    here, there = tmp_path / "here", tmp_path / "there"
    for run in (here, there):
        (run / "control").mkdir(parents=True)
    port = free_port()
    first, second = (Place("a pod", k, 2, 0, 1, 2, "127.0.0.1", port, per_node=1) for k in (0, 1))
    store = open_store(first)
    record = {"time": 2.0, "node": 1, "codes": {"1": 42}, "code": 42, "killed": False}
    (there / "control/node.1.json").write_text(json.dumps(record))
    (there / "control/error.1.json").write_text("{}")
    (here / "control/node.0.json").write_text(json.dumps({**record, "node": 0}))
    (here / "control/error.1.json").write_text("seen")
    send_records(there, second)
    assert store.check([f"{key()}/records/1"])
    await_records(here, 2, store)
    assert read_json(here / "control/node.1.json") == record
    assert (here / "control/error.1.json").read_text() == "seen"


def begin(tmp_path: Path, name: str, *words: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "train.py",
            *TINY,
            "max_steps=5",
            f"paths.runs={tmp_path}",
            f"run_name={name}",
            *words,
        ],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_two_pods_train_as_one_launch(tmp_path: Path) -> None:
    """DIRECT-4: pp2ep2 over two pods that share one port has the losses of one rank that is local."""
    port = str(free_port())
    pod = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NNODES": "2", "GPUS_PER_NODE": "2"}
    started = {
        "pod 1": begin(tmp_path, "pods", "mesh=pp2ep2", **pod, NODE_RANK="1"),
        "pod 0": begin(tmp_path, "pods", "mesh=pp2ep2", "launcher=direct", **pod, NODE_RANK="0"),
        "local": begin(tmp_path, "local"),
    }
    try:
        texts = {name: process.communicate(timeout=250)[0] for name, process in started.items()}
    finally:
        for process in started.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert {name: process.returncode for name, process in started.items()} == dict.fromkeys(started, 0), texts
    pods, local = ([s["loss"] for s in read_steps(tmp_path / n / "metrics.jsonl")] for n in ("pods", "local"))
    assert pods == pytest.approx(local, rel=1e-5)
    assert len(pods) == 5
    assert [(tmp_path / f"pods/control/node.{k}.json").is_file() for k in (0, 1)] == [True, True]
    environment = read_json(tmp_path / "pods/env.json") or {}
    assert environment["GLOO_SOCKET_IFNAME"] == {"value": "lo", "origin": "platform"}
    assert (read_json(tmp_path / "pods/status.json") or {})["state"] == "done"
