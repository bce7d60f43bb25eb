"""Multiruns: names, slots, failures, repeated sweeps, Ctrl-C (SWEEP, EXIT-2, LOCAL-3)."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from src.compose import compose
from src.config import Config
from src.errors import UserError
from src.launchers.jobs import Job, data_failure, make_jobs, prepare_data, swept_places
from src.launchers.launch import Launch, describe_environment
from src.launchers.sweep import Sweep, check_one_launcher, sweep_code
from tests.launchers.conftest import Start
from tests.launchers.test_launch import in_terminal, is_gone, out, rank_pids, snapshot, status, wait_for


@pytest.fixture(scope="module")
def config() -> Config:
    return compose(["data=synthetic"]).config


def test_names(config: Config) -> None:
    """SWEEP-9, RUN-4: `<job>` is the swept pairs, `<sweep>` a hash of the swept overrides in any order."""
    jobs = [
        ["max_steps=3", f"seed={seed}", f"mesh={mesh}"] for seed in (0, 1) for mesh in ("ep2pp2", "single")
    ]
    typed = ["max_steps=3", "seed=0,1", "mesh=ep2pp2,single"]
    assert swept_places(jobs[0], typed) == [1, 2]
    assert swept_places(["seed=0", "max_steps=3"], ["seed=0", "max_steps=3"]) == [0, 1]
    made = make_jobs([config] * 4, jobs, typed)
    assert made[0].name == "seed-0-mesh-ep2pp2"
    assert [job.config.sweep.index for job in made] == [0, 1, 2, 3]
    assert made[0].swept == {"seed": "0", "mesh": "ep2pp2"}
    other = make_jobs([config] * 4, jobs, list(reversed(typed)))
    assert made[0].config.sweep.name == other[0].config.sweep.name
    assert re.fullmatch(r"deepseek_v2-[0-9a-f]{8}", str(made[0].config.sweep.name))
    long = make_jobs(
        [config] * 2, [[f"data.files=[{'x' * 300}{end}]"] for end in "ab"], ["data.files=[a],[b]"]
    )
    assert len({job.name for job in long}) == 2
    assert max(len(job.name) for job in long) <= 96


def job(state: str, code: int | None) -> Job:
    made = Job(Config(), [], {}, None)
    made.end(state, code)
    return made


@pytest.mark.parametrize(
    ("ends", "signals", "code"),
    [
        ([("done", 0), ("done", 0)], [], 0),
        ([("done", 0), ("failed", 42), ("failed", 7)], [], 42),
        ([("stopped", 75), ("failed", 7)], [], 7),
        ([("stopped", 75), ("done", 0)], [], 75),
        ([("stopped", 130), ("cancelled", None)], [2], 130),
        ([("failed", 4), ("cancelled", None)], [], 4),
    ],
)
def test_code(ends: list[tuple[str, int | None]], signals: list[int], code: int) -> None:
    """EXIT-2: the first failed job in sweep order; 75 if none failed but some stopped; 130 after Ctrl-C."""
    assert sweep_code([job(*end) for end in ends], signals) == code


def test_one_launcher(config: Config) -> None:
    """SWEEP-7: items that want another launcher are refused."""
    other = copy.deepcopy(config)
    other.launcher.name = "slurm"
    check_one_launcher([config, config])
    with pytest.raises(UserError, match="SWEEP-7"):
        check_one_launcher([config, other])


def test_each_key_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """SWEEP-2: one preparation a key, `prepare_parallel` at a time; a failed key has its code."""
    running, most, seen = [0], [0], []
    lock = threading.Lock()

    def prepare(config: Any, report: Any) -> Any:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
            seen.append(config)
        time.sleep(0.05)
        with lock:
            running[0] -= 1
        if config == "bad":
            raise UserError("no disk", code=4)
        return SimpleNamespace(built=True, path="p")

    monkeypatch.setattr("src.trainer.data.prepare.prepare", prepare)
    jobs = [
        Job(name, [], {}, key)
        for name, key in (("a", "k1"), ("b", "k1"), ("bad", "k2"), ("c", "k3"), ("d", None))
    ]
    futures = prepare_data(jobs, 2, lambda text: None)
    wait_for(lambda: all(future.done() for future in futures.values()))
    assert sorted(seen) == ["a", "bad", "c"]
    assert most[0] == 2
    assert data_failure(futures["k1"]) is None
    assert data_failure(futures["k2"]) == (4, "UserError", "no disk")
    assert data_failure(None) is None


@pytest.mark.parametrize(
    ("slots", "parallel", "running", "world", "fits", "beside"),
    [
        (2, "auto", [], 4, True, 1),
        (2, "auto", [1], 1, True, 2),
        (2, "auto", [1, 1], 1, False, 2),
        (2, "auto", [1], 2, False, 1),
        (5, "auto", [2], 2, True, 2),
        (2, "3", [1, 1], 2, True, 3),
        (9, "1", [1], 1, False, 1),
    ],
)
def test_slots(
    config: Config, slots: int, parallel: str, running: list[int], world: int, fits: bool, beside: int
) -> None:
    """SWEEP-5, LOCAL-3: max(1, slots / world) jobs side by side; `launcher.parallel` overrides the number."""

    def sized(ep: int, state: str) -> Job:
        mine = copy.deepcopy(config)
        mine.mesh.ep, mine.launcher.slots, mine.launcher.parallel, mine.sweep.name = ep, slots, parallel, "s"
        return Job(mine, [], {}, None, state=state)

    new = sized(world, "queued")
    sweep = Sweep([*(sized(ep, "running") for ep in running), new], "worker")
    assert sweep._has_room(new) == fits
    assert sweep._beside(new) == beside


@pytest.mark.parametrize(("parallel", "beside"), [("auto", 4), ("2", 2)])
def test_jobs_side_by_side_share_nothing(
    config: Config, monkeypatch: pytest.MonkeyPatch, parallel: str, beside: int
) -> None:
    """LOCAL-3, ENV-2: disjoint GPUs out of those that are shown, and a seat each; freed ones are used."""
    shown = ("HIP_VISIBLE_DEVICES", ["7", "3", "GPU-1f", "0", "5"])
    monkeypatch.setattr("src.launchers.sweep.free_devices", lambda config: shown)
    jobs = []
    for _ in range(4):
        mine = copy.deepcopy(config)
        mine.mesh.ep, mine.sweep.name, mine.launcher.parallel = 2, "s", parallel
        mine.launcher.slots = 9
        jobs.append(Job(mine, [], {}))
    sweep = Sweep(jobs, "worker")
    sweep.check_parallel()
    seats = []
    for job in jobs[:2]:
        assert sweep._has_room(job)
        job.seat, job.state = sweep._seat(job), "running"
        seats.append((job.seat.number, job.seat.beside, job.seat.variables))
    assert seats == [
        (0, beside, {"HIP_VISIBLE_DEVICES": "7,3"}),
        (1, beside, {"HIP_VISIBLE_DEVICES": "GPU-1f,0"}),
    ]
    assert not sweep._has_room(jobs[2])
    jobs[0].end("done", 0)
    assert sweep._has_room(jobs[2])
    assert sweep._seat(jobs[2]).variables == {"HIP_VISIBLE_DEVICES": "7,3"}
    assert sweep._seat(jobs[2]).number == 0
    for job in jobs:
        job.config.launcher.parallel = "3"
    with pytest.raises(UserError, match=r"3 jobs x 2 ranks = 6 GPUs, 5 are visible(?s:.*)parallel=2") as no:
        sweep.check_parallel()
    assert no.value.code == 3


def test_caches_of_a_seat(config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """LOCAL-3, CACHE: a single run and the first seat share caches, the others have their own."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    mine = copy.deepcopy(config)
    mine.paths.cache = str(tmp_path)
    launches = [Launch(mine, [], seat=seat) for seat in range(3)]
    found = {describe_environment(launch).values["TORCHINDUCTOR_CACHE_DIR"] for launch in launches}
    assert len(found) == 3
    assert {Path(path).parent.name for path in found} >= {"seat-1", "seat-2"}


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_pairs_of_jobs_never_meet(start: Start, tmp_path: Path) -> None:
    """LOCAL-1: 20 pairs of concurrent launches, two ranks each: no port, directory or store in common."""
    for pair in range(20):
        names = [f"{pair}-{k}" for k in (0, 1)]
        both = [start("launching", "mesh=ep2", "max_steps=2", f"run_name='{name}'") for name in names]
        assert [out(process)[0] for process in both] == [0, 0]
        assert [status(tmp_path / "runs" / name)["state"] for name in names] == ["done", "done"]


@pytest.mark.slow
def test_a_failed_job_stops_no_other_and_the_sweep_goes_on(start: Start, tmp_path: Path) -> None:
    """SWEEP-3, SWEEP-4, EXIT-1: 42 is the sweep's code; typed again, done jobs stay byte for byte."""
    words = ["seed=0,1,2", "max_steps=3"]
    code, text = out(start("sweeping", *words, "+env.FAKE_FAIL=0:exit42@2", "+env.FAKE_FAIL_SEED=1"))
    (directory,) = (tmp_path / "runs").iterdir()
    assert code == 42, text
    assert [status(directory / f"seed-{k}")["state"] for k in range(3)] == ["done", "failed", "done"]
    rows = {row["seed"]: row for row in json.loads((directory / "report.json").read_text())["runs"]}
    assert (rows["1"]["exit_code"], rows["1"]["steps"]) == (42, 1)
    assert "| 1    | failed | 42 " in text
    threads = (directory / "seed-0" / "ranks" / "rank_00000.log").read_text().split()[5]
    cores = len(os.sched_getaffinity(0))
    assert int(threads) == max(1, cores // max(1, cores))
    before = [snapshot(directory / f"seed-{k}") for k in (0, 2)]
    code, text = out(start("sweeping", *words))
    assert code == 0, text
    assert [snapshot(directory / f"seed-{k}") for k in (0, 2)] == before
    assert status(directory / "seed-1")["attempt"] == 2
    groups = json.loads((directory / "report.json").read_text())["groups"]
    assert [(group["n"], group["last_loss"]["mean"]) for group in groups] == [
        (3, pytest.approx(4 / 3 + 1 / 8))
    ]
    assert groups[0]["last_loss"]["sd"] == pytest.approx(1 / 8)


def test_ctrl_c_stops_running_jobs_and_cancels_the_others(start: Start, tmp_path: Path) -> None:
    """SWEEP-6: running jobs save, queued ones never start, the report is written, 130."""
    words = ["seed=0,1,2", "max_steps=200", "+env.FAKE_SLEEP=0.1", "launcher.parallel='1'"]
    process = start("sweeping", *words)
    wait_for(lambda: list(tmp_path.glob("runs/*/seed-0/fake_step")))
    process.send_signal(signal.SIGINT)
    code, text = out(process)
    (directory,) = (tmp_path / "runs").iterdir()
    assert code == 130, text
    assert status(directory / "seed-0")["state"] == "stopped"
    assert not (directory / "seed-1").exists()
    assert text.count("cancelled") >= 2
    assert (directory / "report.md").is_file()


def test_a_killed_sweep_leaves_no_orphan(start: Start, tmp_path: Path) -> None:
    """LOCAL-2: KILL takes jobs and ranks along within 10 s."""
    process = start("sweeping", "seed=0,1", "max_steps=400", "+env.FAKE_SLEEP=0.1")
    wait_for(lambda: len(list(tmp_path.glob("runs/*/*/fake_step"))) == 2)
    pids = [pid for run in tmp_path.glob("runs/*/seed-*") for pid in rank_pids(run)]
    assert len(pids) == 2
    process.kill()
    wait_for(lambda: all(is_gone(pid) for pid in pids), 10)


@pytest.mark.slow
def test_sweep_of_six(checkout: Path, tmp_path: Path) -> None:
    """SWEEP-5, REPORT-2, BAR-1: three seeds on two meshes; means, differences between meshes, one table.

    On a terminal each running job has a line.
    """
    words = ["seed=0,1,2", "mesh=single,ep2", "max_steps=3", "data=synthetic", "+env.FAKE_SLEEP=0.4"]
    code, text = in_terminal(checkout, 120, "sweeping", *words, f"paths.runs={tmp_path}/runs")
    assert re.search(r"seed-0-mesh-single  [━─]* [123]/3 .*\s+seed-\d-mesh-single  ", text)
    (directory,) = (tmp_path / "runs").iterdir()
    assert code == 0, text
    facts = json.loads((directory / "report.json").read_text())
    assert [(row["seed"], row["mesh"], row["state"]) for row in facts["runs"]] == [
        (str(seed), mesh, "done") for seed in range(3) for mesh in ("single", "ep2")
    ]
    assert [(group["keys"], group["n"]) for group in facts["groups"]] == [
        ({"mesh": "single"}, 3),
        ({"mesh": "ep2"}, 3),
    ]
    assert [(pair["seed"], pair["loss"], pair["flagged"]) for pair in facts["meshes"]] == [
        (k, 0.0, False) for k in range(3)
    ]
    assert text.count("| done ") == 6
    assert "Mean ± sd over seed" in text
    assert re.search(r"\| 2 +\| 1\.5833 +\| 1\.5833 +\| \+0\.0000", text)


@pytest.mark.slow
def test_a_sweep_after_an_edit_of_code(start: Start, tmp_path: Path, checkout: Path) -> None:
    """SWEEP-8, RUN-8: each job says what differs and starts as `<job>.2`; typed again, all are done."""
    words = ["seed=0,1", "max_steps=2"]
    assert out(start("sweeping", *words))[0] == 0
    (directory,) = (tmp_path / "runs").iterdir()
    before = [snapshot(directory / f"seed-{k}") for k in (0, 1)]
    source = checkout / "src" / "seeds.py"
    text = source.read_text()
    try:
        source.write_text(text + "\n# edited\n")
        code, said = out(start("sweeping", *words))
        assert code == 0, said
        code, again = out(start("sweeping", *words))
    finally:
        source.write_text(text)
    assert (code, again.count("done before")) == (0, 2)
    for k in (0, 1):
        assert f"seed-{k} has other code (src/seeds.py): it is left as it is" in said
        assert status(directory / f"seed-{k}.2")["state"] == "done"
        assert snapshot(directory / f"seed-{k}") == before[k]
    code, undone = out(start("sweeping", *words))
    assert (code, undone.count("done before")) == (0, 2)
    assert len(list(directory.glob("seed-*"))) == 4


@pytest.mark.slow
def test_failed_data_is_in_every_directory_of_a_sweep(start: Start, tmp_path: Path) -> None:
    """PREP, RUN-6, SWEEP-3: 4 and the reason where the data failed; the other jobs are done."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_bytes(b"text \xff\xff" * 500 if name == "b" else b"text " * 500)
    files = ",".join(f"[{tmp_path}/{name}.txt]" for name in "ab")
    words = [f"data.files={files}", "seed=0,1", "tokenizer=bytes", "data.holdout=0", "evaluation=none"]
    words += ["max_steps=2", "data.on_bad_text=error", f"paths.data={tmp_path}/data"]
    code, said = out(start("sweeping", *words, data="text_files"))
    assert code == 4, said
    (directory,) = (tmp_path / "runs").iterdir()
    found = {path.name: status(path) for path in directory.glob("data.files*")}
    assert sorted(one["state"] for one in found.values()) == ["done", "done", "failed", "failed"]
    for name, one in found.items():
        if "b.txt" in name:
            assert (one["exit_code"], one["attempt"], one["reason"]["type"]) == (4, 1, "UserError")
            assert "b.txt" in one["reason"]["message"]
            assert one["ended"] is not None
    rows = json.loads((directory / "report.json").read_text())["runs"]
    assert sorted(row["exit_code"] for row in rows) == [0, 0, 4, 4]


@pytest.mark.slow
def test_a_sweep_after_an_edit_of_data(start: Start, tmp_path: Path) -> None:
    """SWEEP-8, RUN-8: the job whose corpus was edited runs again and says so, the other is done."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"text {name} " * 500)
    files = ",".join(f"[{tmp_path}/{name}.txt]" for name in "ab")
    words = [f"data.files={files}", "tokenizer=bytes", "data.holdout=0", "evaluation=none", "max_steps=2"]
    words += [f"paths.data={tmp_path}/data"]
    assert out(start("sweeping", *words, data="text_files"))[0] == 0
    (directory,) = (tmp_path / "runs").iterdir()
    before = {path.name: snapshot(path) for path in directory.glob("data.files*")}
    assert len(before) == 2
    (tmp_path / "b.txt").write_text("another text " * 500)
    code, said = out(start("sweeping", *words, data="text_files"))
    assert code == 0, said
    assert said.count("has other data") == 1
    assert said.count("done before") == 1
    after = {path.name: snapshot(path) for path in directory.glob("data.files*")}
    (new,) = after.keys() - before.keys()
    assert f"{tmp_path}/b.txt" in (directory / new / "config.yaml").read_text()
    assert new.endswith(".2")
    assert {name: after[name] for name in before} == before
