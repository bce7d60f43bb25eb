"""What a launch makes of a scheduler that loses nodes, forgets, or does not answer: commands are fakes here.

They stand on PATH instead of Slurm's, and there is no sacct at all (SLURM-2, SUB-1).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from src.compose import compose, dump_config
from src.config import Config
from src.errors import UserError
from src.launchers import batch, follow, remote, scheduler
from src.launchers.node import place_of
from src.launchers.slurm import Slurm
from src.records import read_json, write_json
from src.status import Status

pytest.importorskip("src.launchers.submit", reason="submitit is not installed", exc_type=ImportError)
Fakes = Callable[..., None]


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Make commands of Slurm: `fakes(squeue="echo 7|RUNNING|None")`; what is not named does not exist."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
    for name in ("squeue", "sbatch", "scontrol", "scancel", "sacct", "srun"):
        path = folder / name
        path.write_text("#!/bin/sh\nexit 127\n")
        path.chmod(0o755)

    def make(**commands: str) -> None:
        for name, body in commands.items():
            (folder / name).write_text(f"#!/bin/sh\n{body}\n")

    return make


@pytest.fixture(scope="module")
def base() -> Config:
    return compose(["launcher=slurm", "data=synthetic", "run_name=one"]).config


@pytest.fixture
def config(base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A job whose code is not copied."""
    monkeypatch.setattr(remote, "snapshot", lambda store, code: store / ".code" / "x")
    return replace(base, paths=replace(base.paths, runs=f"{tmp_path}/runs"))


def result(config: Config) -> tuple[int, dict[str, Any]]:
    """Code and status of one command."""
    code = remote.run_job(config, ["launcher=slurm"])
    return code, read_json(Path(config.paths.runs) / "one" / "status.json") or {}


SUBMITTED = "echo Submitted batch job 7"


@pytest.mark.parametrize(
    ("line", "code", "kind"),
    [
        ("7|NODE_FAIL|None", 5, "NODE_FAIL"),
        ("7|BOOT_FAIL|None", 5, "BOOT_FAIL"),
        ("7|PENDING|launch failed requeued held", 5, "HELD"),
        ("7|OUT_OF_MEMORY|None", 137, "OUT_OF_MEMORY"),
        ("", 5, "LOST"),
    ],
)
def test_an_end_that_the_scheduler_tells(
    config: Config, fakes: Fakes, monkeypatch: pytest.MonkeyPatch, line: str, code: int, kind: str
) -> None:
    """SLURM-2: code and reason of a node that fails or never starts, of a job that is forgotten."""
    monkeypatch.setattr(scheduler, "UNKNOWN", 0.2)
    fakes(sbatch=SUBMITTED, squeue=f"echo '{line}'")
    found, status = result(config)
    assert (found, status["state"], status["reason"]["type"]) == (code, "failed", kind)
    found, status = result(config)
    assert (found, status["attempt"]) == (code, 2)


def test_a_refused_submission(config: Config, fakes: Fakes) -> None:
    """EXIT: 5 with what sbatch said, in `status.json` too."""
    fakes(sbatch="echo 'sbatch: error: invalid partition' >&2; exit 1")
    code, status = result(config)
    assert (code, status["state"], status["exit_code"]) == (5, "failed", 5)
    assert "invalid partition" in status["reason"]["message"]


def test_a_queue_that_does_not_answer(config: Config, fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM-2, SLURM-6: what the run itself says ends it; else 5 in time, with the job left alone."""
    monkeypatch.setattr(follow, "DEAF", 0.2)
    monkeypatch.setattr(follow, "GIVE_UP", 0.6)
    fakes(sbatch=SUBMITTED, squeue="exit 1")
    code, status = result(config)
    assert (code, status["state"]) == (5, "queued")
    assert remote.run_job(config, []) == 5  # Whether job 7 is still there is unknown: no second one.
    assert read_json(Path(config.paths.runs) / "one" / "job.json") == {
        **(read_json(Path(config.paths.runs) / "one" / "job.json") or {}),
        "id": "7",
    }
    run = Path(config.paths.runs) / "one"
    ended = Status("done", 1, "", exit_code=0)
    queue = follow.Queue(Slurm(), [run])
    queue._heard -= 0.3
    ended.write(run)
    verdict = queue.verdict(run)
    assert verdict is not None
    assert (verdict.state, verdict.code) == ("done", 0)


@pytest.mark.parametrize("scontrol", ["exit 1", "sleep 9"])
def test_a_requeue_that_fails(
    config: Config, fakes: Fakes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scontrol: str
) -> None:
    """SLURM-3: a broken or hanging scontrol leaves a stopped run, which the same command goes on with."""
    monkeypatch.setattr(scheduler, "PATIENCE", 0.3)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    fakes(scontrol=scontrol)
    run = tmp_path / "run"
    (run / "control").mkdir(parents=True)
    (run / "config.yaml").write_text(dump_config(config))
    (run / "control" / "started").write_text("")
    (run / "control" / "requeue").write_text("saved\n")
    (run / "checkpoints" / "step-00000004").mkdir(parents=True)
    record = {"node": 0, "time": 1.0, "codes": {"0": 0}, "killed": False, "code": 0}
    (run / "control" / "node.0.json").write_text(json.dumps(record))
    Status("running", 1, "").write(run)
    assert batch.end(run, 0, killed=False) == 75
    status = read_json(run / "status.json") or {}
    assert (status["state"], status["exit_code"]) == ("stopped", 75)
    assert not (run / "control" / "requeued").exists()
    assert Slurm().most_tasks() == 1001
    assert Slurm().code("7") == 1


def test_a_job_whose_command_was_killed_notes_itself(config: Config, fakes: Fakes, tmp_path: Path) -> None:
    """RUN-5: killed between sbatch and noting, no second job trains in the same directory.

    On Spur a job that is over puts another one in its place, which may begin before the first has ended.
    """
    write_json(tmp_path / "job.json", {"worker": "w", "id": None})
    assert batch.adopt(tmp_path, config, "7")
    assert (read_json(tmp_path / "job.json") or {})["id"] == "7"
    fakes(squeue="echo '7|RUNNING|None'")
    assert not batch.adopt(tmp_path, config, "8")
    fakes(squeue="exit 1")
    assert not batch.adopt(tmp_path, config, "8")
    fakes(squeue="echo '7|COMPLETED|None'")
    assert batch.adopt(tmp_path, config, "8")
    assert batch.adopt(tmp_path, config, None)
    spur = replace(config, launcher=replace(config.launcher, name="spur"))
    fakes(squeue="echo '8|RUNNING|None'")
    assert not batch.adopt(tmp_path, spur, "9")
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / batch.REQUEUED).touch()
    assert not batch.adopt(tmp_path, config, "9")
    assert batch.adopt(tmp_path, spur, "9")
    assert (read_json(tmp_path / "job.json") or {})["id"] == "9"
    assert (
        scheduler.own_id({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "1"})
        == "8_1"
    )
    assert scheduler.own_id({"SLURM_JOB_ID": "9"}) == "9"


def test_the_expander_asks_nobody(fakes: Fakes) -> None:
    """HOST-1: a broken scontrol changes no address."""
    fakes(scontrol="sleep 9")
    shell = {"SLURM_PROCID": "1", "SLURM_NTASKS": "3", "SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n[08-10]"}
    assert place_of(shell).first_host == "n08"


def test_data_that_never_may_be_built_is_refused_before_submission(
    config: Config, fakes: Fakes, tmp_path: Path
) -> None:
    """PREP-3: `never` is exit 4 with the command that builds it; no job is submitted."""
    (tmp_path / "a.txt").write_text("text " * 400)
    config.tokenizer = replace(config.tokenizer, kind="bytes")
    config.paths = replace(config.paths, data=f"{tmp_path}/data")
    files = replace(config.data, kind="text_files", files=[f"{tmp_path}/a.txt"])
    fakes(sbatch=f"touch {tmp_path}/submitted; {SUBMITTED}", squeue="echo '7|NODE_FAIL|None'")
    code, status = result(replace(config, data=replace(files, prepare=replace(files.prepare, where="never"))))
    assert (code, status["exit_code"]) == (4, 4)
    assert "prepare_data.py build" in status["reason"]["message"]
    assert not (tmp_path / "submitted").exists()
    assert not (tmp_path / "data" / "tokens").exists()
    code, status = result(replace(config, data=replace(files, prepare=replace(files.prepare, where="job"))))
    assert (code, (tmp_path / "submitted").exists()) == (5, True)
    assert not (tmp_path / "data" / "tokens").exists()


def test_is_over_needs_an_answer(fakes: Fakes) -> None:
    """SLURM-6: unknown is not gone."""
    fakes(squeue="echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(UserError, match="squeue does not answer"):
        follow.is_over(Slurm(), "7")
    fakes(squeue="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert follow.is_over(Slurm(), "7")
