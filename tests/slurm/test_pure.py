"""Host lists, ranks over nodes, flags, scripts, states, places: pure, everywhere (HOST, FLAG, DIRECT)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from src import runs
from src.code_identity import CHECKOUT, code_record
from src.compose import compose
from src.config import Config
from src.errors import UserError
from src.launchers import batch, flags, places, remote, scheduler
from src.launchers import node as agent
from src.launchers.hostlist import expand
from src.launchers.launch import Launch
from src.launchers.outcome import codes_of_nodes, first_failure
from src.launchers.plan import make_plan
from src.launchers.remote_sweep import groups
from src.launchers.scheduler import Seen, merge, read_squeue
from src.launchers.slurm import Slurm
from src.launchers.snapshot import snapshot
from src.launchers.spread import Spread, spread
from src.status import Status

BASE = ("launcher=slurm", "data=synthetic")
submit = pytest.importorskip("src.launchers.submit", reason="submitit is not installed", exc_type=ImportError)


@cache
def made(*overrides: str) -> Config:
    return compose([*BASE, *overrides]).config


HOSTS = {
    "n1": ["n1"],
    " n1 , n2 ": ["n1", "n2"],
    "n[1-3]": ["n1", "n2", "n3"],
    "n[01-03]": ["n01", "n02", "n03"],
    "n[098-101]": ["n098", "n099", "n100", "n101"],
    "n[1,3-4]": ["n1", "n3", "n4"],
    "a[1-2],b7": ["a1", "a2", "b7"],
    "r[1-2]n[1-2]": ["r1n1", "r1n2", "r2n1", "r2n2"],
    "n[1-2]-ib": ["n1-ib", "n2-ib"],
    "n[1-2].x.org": ["n1.x.org", "n2.x.org"],
}


@pytest.mark.parametrize("text", HOSTS)
def test_host_lists(text: str) -> None:
    """HOST: padding and suffixes kept, left index slowest, blanks trimmed."""
    assert expand(text) == HOSTS[text]


@pytest.mark.parametrize(
    ("text", "position"),
    [("", 0), ("n[3-1]", 2), ("n[1-", 4), ("n[a-b]", 2), ("n1,,n2", 3), ("n]1", 1), ("n[1[2]]", 3)],
)
def test_wrong_host_lists(text: str, position: int) -> None:
    """HOST: an error with its position."""
    with pytest.raises(ValueError, match=f"position {position}$"):
        expand(text)


def test_many_hosts_are_quick() -> None:
    """HOST: 10,000 nodes in less than 50 ms."""
    begin = time.perf_counter()
    assert len(expand("n[00001-10000]")) == 10_000
    assert time.perf_counter() - begin < 0.05


@pytest.mark.parametrize(
    ("words", "nodes", "ranks"),
    [
        ([], 1, 1),
        (["mesh=pp2ep2"], 1, 4),
        (["mesh=pp2ep2", "launcher.nodes=2"], 2, 2),
        (["mesh=pp2ep2", "launcher.gpus_per_node=2"], 2, 2),
        (["mesh=pp2ep2", "launcher.gpus_per_node=8"], 1, 4),
        (["mesh=pp2ep2", "launcher.gpus_per_node=4", "launcher.nodes=4"], 4, 1),
    ],
)
def test_ranks_over_nodes(words: list[str], nodes: int, ranks: int) -> None:
    """PLAN-2: as few nodes as the mesh needs, on CPU one, or as many as asked for."""
    plan = make_plan(made(*words), [])
    assert (plan.nodes, plan.ranks_per_node) == (nodes, ranks)


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (["mesh=pp3", "launcher.nodes=2"], "3 ranks of mesh=pp3 do not divide over 2 nodes"),
        (["mesh=pp3", "launcher.gpus_per_node=2"], "3 ranks of mesh=pp3 do not divide over 2 GPUs a node"),
        (["mesh=pp2ep2", "launcher.gpus_per_node=1", "launcher.nodes=2"], "4 ranks / 2 nodes = 2 a node"),
        (["platform=cuda"], "GPUs of a node are not given"),
    ],
)
def test_contradictions_show_the_arithmetic(words: list[str], numbers: str) -> None:
    """PLAN-2: both numbers, and exit 2."""
    with pytest.raises(UserError, match=numbers) as refused:
        make_plan(made(*words), [])
    assert refused.value.code == 2


def test_local_launches_stay_on_one_node() -> None:
    """PLAN-2: a site file's `launcher.nodes` says nothing about this machine."""
    config = compose(["data=synthetic", "mesh=pp2ep2", "launcher.nodes=2"]).config
    assert spread(config, "cpu") == Spread(1, 4)
    assert make_plan(config, []).flags == []


def table(*words: str) -> dict[str, tuple[str, str]]:
    return {flag.name: (flag.value, flag.origin) for flag in make_plan(made(*words), list(words)).flags}


def test_flags_and_origins() -> None:
    """SLURM-1, PLAN-1: time in whole minutes, each flag once with its origin, GPUs by node."""
    found = table("launcher.time=90s", "launcher.partition=big", "launcher.gpus_per_node=4", "mesh=ep2")
    assert found["time"] == ("2", "launcher.time (command line), in whole minutes")
    assert found["partition"] == ("big", "launcher.partition (command line)")
    assert found["gpus-per-node"][0] == "2"
    assert found["cpus-per-task"] == ("2", "derived: a core for each rank")
    assert found["signal"][0] == "USR2@60"
    assert "gpus-per-node" not in table("mesh=ep2")


def test_a_file_is_an_origin() -> None:
    """PLAN-1: what was not typed came from a file."""
    config = made("launcher.partition=big")
    assert make_plan(config, []).flags[-2].origin == "launcher.partition (site file or group)"


def test_extra_flags() -> None:
    """FLAG: short names become long ones, the last layer wins and stands once, `"true"` is a bare flag."""
    words = ["launcher.partition=a", "+launcher.extra.p=b", "+launcher.extra.gres='x:1'"]
    found = table(*words, "+launcher.extra.exclusive='true'", '+launcher.extra.comment="a b=c"')
    assert found["partition"][0] == "b"
    assert found["comment"][0] == "a b=c"
    bare = [str(flag) for flag in make_plan(made("+launcher.extra.exclusive='true'"), []).flags]
    assert "--exclusive" in bare
    assert flags.long_name("--cpus-per-task") == flags.long_name("c") == "cpus-per-task"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("-N 2", {"nodes": "2"}),
        ("-N2", {"nodes": "2"}),
        ("--nodes 2", {"nodes": "2"}),
        ("--nodes=2", {"nodes": "2"}),
        ("--nodes=2-4", {"nodes": "2-4"}),
        ("-pgpu -Jx -t 1:00", {"partition": "gpu", "job-name": "x", "time": "1:00"}),
        ("-qhigh -xn[3-4] -Cfast", {"qos": "high", "exclude": "n[3-4]", "constraint": "fast"}),
        ("--exclusive --mem=1G", {"exclusive": "true", "mem": "1G"}),
        ("--exclusive=user", {"exclusive": "user"}),
        ('--comment="a b=c"', {"comment": "a b=c"}),
        ("--gres=x:1 --mem=1 --gres=x:2", {"mem": "1", "gres": "x:2"}),
        ("--unknown --other=1 -- -p x", {"unknown": "true", "other": "1"}),
        ("", {}),
    ],
)
def test_words_of_a_command_line(words: str, found: dict[str, str]) -> None:
    """FLAG: every spelling, values with blanks, unknown flags in order, the last of a name, `--` ends."""
    assert list(flags.parse_words(words).items()) == list(found.items())


@pytest.mark.parametrize("words", ["gpu", "-Z3", "-", "--mem=1 big 2", "--exclusive user", '--comment="a'])
def test_words_that_are_no_flags(words: str) -> None:
    """FLAG: refused with the word."""
    with pytest.raises(UserError, match=r"is no flag of sbatch|No closing quotation"):
        flags.parse_words(words)


def test_the_last_layer_of_a_flag_decides() -> None:
    """FLAG: preset, site, command line: a typed key goes before a site's other spelling of the same flag."""
    config = made("launcher.partition=a", "+launcher.extra.p=b", 'launcher.flags="--mem=1 -pc"')
    for typed, partition in (
        (["launcher.partition=a"], "a"),
        (["+launcher.extra.p=b"], "b"),
        (["launcher.partition=a", "launcher.flags=x"], "c"),
        ([], "c"),
    ):
        shown = [flag for flag in make_plan(config, typed).flags if flag.name == "partition"]
        assert [flag.value for flag in shown] == [partition]
    same = made("launcher.nodes=1", "launcher.flags=-N1")
    assert [flag.value for flag in make_plan(same, []).flags if flag.name == "nodes"] == ["1"]
    with pytest.raises(UserError, match=r"--nodes=2 .*launcher\.nodes, --nodes=1 .*contradicts"):
        make_plan(made("launcher.nodes=1", "launcher.flags=-N2"), [])


@pytest.mark.parametrize("key", ["nodes", "N", "ntasks_per_node", "signal", "o", "array"])
def test_extra_flags_that_contradict(key: str) -> None:
    """FLAG: what the plan decides is not decided twice."""
    with pytest.raises(UserError, match="is decided elsewhere"):
        make_plan(made(f"+launcher.extra.{key}='2'"), [])


STATES: list[tuple[str | None, str | None, bool, float, tuple[str, int] | None]] = [
    ("PENDING", None, False, 99.0, None),
    ("RUNNING", "done", False, 99.0, None),
    ("COMPLETING", "failed", False, 99.0, None),
    ("CONFIGURING", "queued", False, 99.0, None),
    ("COMPLETED", "done", False, 0.0, ("done", 0)),
    ("COMPLETED", "running", False, 14.0, None),
    ("COMPLETED", "running", False, 15.0, ("failed", 9)),
    ("FAILED", "failed", False, 0.0, ("failed", 42)),
    ("FAILED", "queued", False, 16.0, ("failed", 9)),
    ("CANCELLED", "done", False, 0.0, ("failed", 143)),
    ("TIMEOUT", "running", False, 0.0, ("failed", 143)),
    ("TIMEOUT", "running", True, 0.0, ("stopped", 75)),
    ("PREEMPTED", "running", True, 0.0, ("stopped", 75)),
    ("OUT_OF_MEMORY", "running", False, 0.0, ("failed", 137)),
    ("NODE_FAIL", "running", False, 0.0, ("failed", 5)),
    ("BOOT_FAIL", "queued", False, 0.0, ("failed", 5)),
    ("DEADLINE", "queued", False, 0.0, ("failed", 143)),
    (None, "done", False, 0.0, ("done", 0)),
    (None, "running", False, 9.0, None),
    (None, "running", False, 10.0, ("failed", 5)),
    (None, None, False, 10.0, ("failed", 5)),
]


@pytest.mark.parametrize(("state", "ours", "saved", "waited", "expected"), STATES)
def test_states(
    state: str | None, ours: str | None, saved: bool, waited: float, expected: tuple[str, int] | None
) -> None:
    """SLURM-2: the scheduler's state beside ours; no success without our `done`."""
    codes = {"done": 0, "failed": 42, "running": None, "queued": None}
    status: dict[str, Any] | None = None if ours is None else {"state": ours, "exit_code": codes[ours]}
    seen = None if state is None else Seen(state, "None")
    found = merge(seen, status, saved, waited, code=9)
    assert (None if found is None else (found.state, found.code)) == expected
    assert found is None or found.state != "done" or ours == "done"


def test_squeue_lines() -> None:
    """SLURM-2: ids of arrays, reasons with blanks; other lines are none."""
    found = read_squeue("12_0|RUNNING|None\n13|PENDING|Nodes required, DOWN\nslurm_load_jobs error\n")
    assert found == {"12_0": Seen("RUNNING", "None"), "13": Seen("PENDING", "Nodes required, DOWN")}
    held = read_squeue("14|PENDING|launch failed requeued held\n15|PENDING|JobHeldUser\n")
    assert [seen.is_alive for seen in held.values()] == [False, True]


def test_variables_of_an_outer_job_do_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """SUB-7: SBATCH_* and the like are gone while Slurm's commands run; where its config is stays."""
    gone = {"SBATCH_PARTITION": "x", "SLURM_JOB_ID": "1", "SRUN_DEBUG": "1", "SLURM_CONF_SERVER_X": "1"}
    kept = {"SLURM_CONF": "/x", "SPUR_CONTROLLER_ADDR": "h"}
    for name, value in (gone | kept).items():
        monkeypatch.setenv(name, value)
    with scheduler.outside_of_jobs():
        assert not {*gone} & {*os.environ}
        assert {*kept} <= {*os.environ}
    assert {*gone} <= {*os.environ}


def test_script_and_submission_are_one_text(tmp_path: Path) -> None:
    """PLAN-1, PLAN-4: absolute paths, no argument but a table of runs, code first, bash accepts it."""
    config = made(f"paths.runs={tmp_path}/runs", "mesh=ep2", "launcher.nodes=2", "launcher.time=1h")
    plan = make_plan(config, [])
    text = Slurm().script(config, [plan])
    assert list(tmp_path.iterdir()) == []
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert f"runs=({plan.run_directory})" in text
    assert "--kill-on-bad-exit=1" in text
    assert f"""/bin/sh -c 'trap "" TERM USR1 USR2; exec "$0" "$@"' {sys.executable} -u -m submitit""" in text
    assert "#SBATCH --wckey" not in text
    assert "#SBATCH --time=60" in text
    assert "PYTHONSAFEPATH=1" in text
    code = tmp_path / "runs" / ".code"
    assert f"export PYTHONPATH={code}/" in text


def test_odd_directories_reach_the_script_unchanged(tmp_path: Path) -> None:
    """PLAN-3: only directories travel, whatever letters they have."""
    runs = [tmp_path / "a b$c'd", tmp_path / 'e"f;*']
    script = submit.executor(tmp_path / "f", [], runs, tmp_path / "co de", None).script(2)
    lines = [line for line in script.splitlines() if line.startswith(("runs=", "run=", "export PYTHONPATH"))]
    for task, run in enumerate(runs):
        shown = subprocess.run(
            ["bash", "-c", "\n".join([*lines, 'printf "%s\\n%s" "$run" "$PYTHONPATH"'])],
            env={"SLURM_ARRAY_TASK_ID": str(task), "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
        ).stdout
        assert shown == f"{run}\n{tmp_path / 'co de'}"
    assert "#SBATCH --array=0-1%2" in script


def test_plan_and_script_ignore_a_stray_spur(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PLAN-7: byte-equal with and without a `spur` on PATH."""
    config = made(f"paths.runs={tmp_path}/runs")
    before = Slurm().script(config, [make_plan(config, [])])
    (tmp_path / "spur").write_text("#!/bin/sh\n")
    (tmp_path / "spur").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert Slurm().script(config, [make_plan(config, [])]) == before


def test_dry_run_needs_no_slurm(tmp_path: Path) -> None:
    """CFG-17: script, origins and JSON without Slurm; nothing is written; for a sweep one script a group."""
    environment = {"PATH": "/nowhere", "PYTHONPATH": str(CHECKOUT), "HOME": str(tmp_path)}
    words = ["launcher=slurm", "data=synthetic", "dry_run=true", "seed=0,1", "mesh=single,ep2"]
    command = [sys.executable, str(CHECKOUT / "train.py"), "-m", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("#!/bin/bash") == 2
    assert "(derived: one task a node, which starts its ranks)" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["launcher"] == "slurm"
    assert list(tmp_path.iterdir()) == []


def test_without_slurm_nothing_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """EXIT, DIRECT-5: no sbatch is exit 3; inside of a job exit 2."""
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="no sbatch") as refused:
        Slurm().need()
    assert refused.value.code == 3
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/sbatch")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(UserError, match="inside of job 7"):
        Slurm().need()


def test_a_job_that_another_command_submitted_meanwhile_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM-6, RUN-5: two commands at once submit one job; the second finds it once it holds the lock."""
    config = made(f"paths.runs={tmp_path}", "run_name=one")
    found = runs.Claim(tmp_path / "one", 1)
    found.path.mkdir()
    (found.path / "job.json").write_text('{"id": "12"}')
    Status("queued", 1, "").write(found.path)
    monkeypatch.setattr(Slurm, "look", lambda self, ids: {"12": Seen("PENDING", "None")})
    launch = Launch(config, [])
    assert remote.submit_one(launch, Slurm(), found, make_plan(config, []), code_record()) == "12"
    assert not (found.path / "run.lock").exists()


def test_groups_of_a_sweep() -> None:
    """SLURM-5: one array per kind of resources, split where an array may have fewer tasks."""
    plans = [make_plan(made(f"seed={k}", f"mesh={m}"), []) for k in range(3) for m in ("single", "ep2")]
    for plan in plans:
        plan.flags[:] = [flag for flag in plan.flags if flag.name != "job-name"]
    assert groups(plans) == [[0, 2, 4], [1, 3, 5]]
    assert groups(plans, most=2) == [[0, 2], [4], [1, 3], [5]]


def test_snapshot(tmp_path: Path) -> None:
    """PLAN-4: the code as it was, new sources too, once per code; a later edit makes another."""
    root, store = tmp_path / "checkout", tmp_path / "runs"
    (root / "src").mkdir(parents=True)
    (root / "src" / "new.py").write_text("1")
    (root / "train.py").write_text("1")
    first = snapshot(store, code_record(root), root)
    (root / "src" / "new.py").write_text("2")
    assert (first / "src" / "new.py").read_text() == "1"
    assert (first / "train.py").is_file()
    second = snapshot(store, code_record(root), root)
    assert (second / "src" / "new.py").read_text() == "2"
    assert sorted(path.name for path in first.parent.iterdir()) == sorted([first.name, second.name])


def node(number: int, at: float, codes: dict[str, int], killed: bool = False) -> dict[str, Any]:
    return {"node": number, "time": at, "codes": codes, "killed": killed, "code": int(any(codes.values()))}


def test_codes_of_nodes(tmp_path: Path) -> None:
    """AGENT-4: a rank that an agent killed after another node's failure is not the first failure."""
    records = [node(1, 1.0, {"2": 0, "3": -9}), node(0, 2.0, {"0": -9, "1": -15}, killed=True)]
    assert codes_of_nodes(records) == {2: 0, 3: -9}
    failure = first_failure(tmp_path, codes_of_nodes(records))
    assert failure is not None
    assert (failure.rank, failure.code) == (3, 137)


@pytest.mark.parametrize(
    ("records", "step", "expected"),
    [
        ([node(0, 1.0, {"0": 0}), node(1, 1.0, {"1": 0})], 0, ("done", 0)),
        ([node(0, 1.0, {"0": 0}), node(1, 1.0, {"1": 42})], 143, ("failed", 42)),
        ([node(0, 1.0, {"0": 0})], 137, ("failed", 137)),
        ([node(0, 1.0, {"0": 0})], 0, ("failed", 1)),
        ([], 6, ("failed", 6)),
        ([{**node(0, 1.0, {}), "code": 6, "type": "UserError", "message": "n1"}], 6, ("failed", 6)),
    ],
)
def test_batch_side_settles(
    records: list[dict[str, Any]], step: int, expected: tuple[str, int], tmp_path: Path
) -> None:
    """SLURM-3, RUN-6: done needs every rank of every node, whatever srun says."""
    (tmp_path / "control").mkdir()
    for record in records:
        (tmp_path / "control" / f"node.{record['node']}.json").write_text(json.dumps(record))
    status = Status("running", 1, "")
    batch.settle_nodes(status, tmp_path, step, world=2)
    assert (status.state, status.exit_code) == expected


def test_requeue_needs_a_newer_checkpoint_and_has_a_limit(tmp_path: Path) -> None:
    """SLURM-3: never without progress, and `launcher.max_requeues` times at most."""
    config = made("launcher.max_requeues=1")
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "started").write_text("step-00000005")
    (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
    assert not batch.may_requeue(tmp_path, config)
    (tmp_path / "checkpoints" / "step-00000010").mkdir()
    assert batch.may_requeue(tmp_path, config)
    (tmp_path / "attempts" / "0001" / "control").mkdir(parents=True)
    (tmp_path / "attempts" / "0001" / "control" / "requeued").touch()
    assert not batch.may_requeue(tmp_path, config)


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
TORCHRUN |= {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
SRUN = {"SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "2"}
SRUN |= {"SLURM_LOCALID": "0", "SLURM_JOB_ID": "40", "SLURM_STEP_NODELIST": "n[1-2]"}


def test_places() -> None:
    """DIRECT: what each environment names; one task is an ordinary launch."""
    first = places.recognise(TORCHRUN)
    assert first is not None
    assert (first.rank, first.tasks, first.nodes, first.has_store) == (1, 4, 2, True)
    second = places.recognise(SRUN)
    assert second is not None
    assert (second.rank, second.local_tasks, second.address, second.port) == (2, 2, "n1", 12061)
    assert second.variables(3)["MANYHEAD_ATTEMPT"] == "3"
    assert places.recognise({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert places.recognise({"SLURM_JOB_ID": "4", "SLURM_PROCID": "0", "MASTER_ADDR": "x"}) is None


@pytest.mark.parametrize(
    ("shell", "words"),
    [
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_PORT"}, "MASTER_PORT missing"),
        ({k: v for k, v in SRUN.items() if k != "SLURM_LOCALID"}, "SLURM_LOCALID missing"),
        ({**SRUN, "MASTER_ADDR": "n2"}, "MASTER_ADDR=n2 is not the first host of the step, n1"),
    ],
)
def test_partial_places_are_refused(shell: dict[str, str], words: str) -> None:
    """DIRECT: a part of a row is no row; exit 2 names what is missing."""
    with pytest.raises(UserError, match=words) as refused:
        places.recognise(shell)
    assert refused.value.code == 2


def test_first_host_with_its_domain() -> None:
    """DIRECT: the leading label decides."""
    found = places.recognise({**SRUN, "MASTER_ADDR": "n1.x.org"})
    assert found is not None
    assert found.address == "n1.x.org"


@pytest.mark.parametrize(
    ("shell", "mesh", "kind"),
    [
        (SRUN, "pp2ep2", "rank"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "2"}, "pp2ep2", "node"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "2"}, "dp2", "rank"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "3"}, "pp2ep2", "srun started 3 processes, .* 4 ranks"),
        (
            {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"},
            "pp2ep2",
            "srun started 2 processes, .* 4 ranks",
        ),
        (TORCHRUN, "ep2", "torchrun started 4 processes, .* 2 ranks"),
    ],
)
def test_roles(shell: dict[str, str], mesh: str, kind: str) -> None:
    """DIRECT: tasks = world are ranks, tasks = nodes are agents; other counts are refused with both."""
    place = places.recognise(shell)
    assert place is not None
    config = compose(["data=synthetic", f"mesh={mesh}"]).config
    if kind in ("rank", "node"):
        assert places.role(place, config) == kind
    else:
        with pytest.raises(UserError, match=kind):
            places.role(place, config)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launcher=direct"], "the environment names no rank"),
        (["launcher=slurm", "hydra.mode=RUN"], "submits jobs and trains nothing here"),
    ],
)
def test_launchers_that_do_not_fit(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """DIRECT-5, PLAN-5: `direct` insists on a rank, `slurm` never trains here; exit 2."""
    from src.command_line import main

    assert main([*words, "data=synthetic"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("told", "ranks", "threads"), [("1", 1, "1"), ("4", 2, "2"), ("64", 1, "8"), (None, 2, "4"), ("", 1, "8")]
)
def test_env_threads_are_those_of_the_allocation(
    monkeypatch: pytest.MonkeyPatch, told: str | None, ranks: int, threads: str
) -> None:
    """ENV: a job that asked for one core of eight does not start eight threads, which would spin on it."""
    monkeypatch.setattr(agent, "cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    if told is not None:
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", told)
    assert agent.node_environment(made(), ranks, None).values["OMP_NUM_THREADS"] == threads


def test_plan_1_threads_of_a_job_are_not_those_of_the_login_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("src.launchers.plan.cores", lambda: 96)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for words, threads in (([], "1"), (["launcher.cpus_per_task=6"], "6"), (["mesh=ep2"], "1")):
        plan = make_plan(made(*words), words)
        assert plan.env["OMP_NUM_THREADS"] == threads
