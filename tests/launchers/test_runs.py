"""Which directory a command means and what a new attempt keeps (RUN)."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from src.code_identity import CodeRecord, code_differences, code_record
from src.compose import compose, dump_config
from src.config import Config
from src.errors import UserError
from src.launchers import launch
from src.resume import MAY_DIFFER, differences
from src.runs import Claim, begin_attempt, claim
from src.status import Status, read_status

CODE = CodeRecord("c0de", {"src/a.py": "1", "src/b.py": "2"}, {"torch": "2.13"}, "3.11", None, None)
EDITED = dataclasses.replace(CODE, code_identity="ed17", files={"src/a.py": "1", "src/b.py": "3"})
Make = Callable[..., Config]


@pytest.fixture(scope="module")
def base() -> Config:
    return compose(["data=synthetic", "max_steps=10"]).config


@pytest.fixture
def make(base: Config, tmp_path: Path) -> Make:
    """The base config with dotted keys changed, its runs below `tmp_path`."""

    def build(**changes: object) -> Config:
        import copy

        config = copy.deepcopy(base)
        config.paths.runs = str(tmp_path)
        for key, value in changes.items():
            *groups, name = key.split("__")
            owner = config
            for group in groups:
                owner = getattr(owner, group)
            setattr(owner, name, value)
        return config

    return build


def begin(
    config: Config,
    code: CodeRecord = CODE,
    data_key: str | None = "d0",
    state: str = "running",
    step: int = 0,
) -> Claim:
    """Claim, write papers and status, let go: what a launching process that was killed leaves."""
    taken = claim(config, code, data_key)
    papers = {"config.yaml": dump_config(config), "overrides.yaml": "[]\n"}
    papers["code.json"] = json.dumps({**code.json(), "data_key": data_key})
    begin_attempt(taken, papers)
    Status(state, taken.attempt, "digest", last_step=step).write(taken.path)
    taken.release()
    return taken


def test_the_same_command_finds_the_same_directory(make: Make) -> None:
    """RUN-1, RUN-2: unfinished it is gone on with, finished it is left alone."""
    first = begin(make())
    assert (first.attempt, first.finished, first.notes) == (1, False, [])
    second = begin(make(), state="done", step=10)
    assert (second.path, second.attempt) == (first.path, 2)
    third = claim(make(), CODE, "d0")
    assert (third.path, third.finished, third.lock) == (first.path, True, None)
    assert "run_name=" in third.notes[-1]
    assert claim(make(seed=1), CODE, "d0").path != first.path


def test_papers_move_and_logs_stay(make: Make) -> None:
    """RUN-3: papers go to attempts/0001, control/ starts empty, lines and ranks' logs stay."""
    run = begin(make()).path
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    (run / "ranks" / "rank_00000.log").write_text("log\n")
    (run / "launcher.log").write_text("said\n")
    (run / "control" / "stop").write_text("INT\n")
    begin(make())
    kept = {path.name for path in (run / "attempts" / "0001").iterdir()}
    assert kept == {"config.yaml", "overrides.yaml", "code.json", "status.json", "launcher.log", "control"}
    assert list((run / "control").iterdir()) == []
    assert (run / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert (run / "ranks" / "rank_00000.log").read_text() == "log\n"
    begin(make())
    assert sorted(path.name for path in (run / "attempts").iterdir()) == ["0001", "0002"]


def test_killed_between_moving_and_writing(make: Make) -> None:
    """RUN-3: the config under attempts/ still decides, and the next attempt has a number of its own."""
    run = begin(make(run_name="one")).path
    kept = run / "attempts" / "0001"
    kept.mkdir(parents=True)
    for name in ("code.json", "config.yaml"):
        (run / name).rename(kept / name)
    assert claim(make(run_name="one"), CODE, "d0").attempt == 2
    with pytest.raises(UserError, match=r"seed: 0 -> 1"):
        claim(make(run_name="one", seed=1), CODE, "d0")


@pytest.mark.parametrize("step", [4, 10])
def test_other_code_or_data_under_the_default_name(make: Make, step: int) -> None:
    """RUN-8: left as it is, finished or not, with a line; `.2` next, and the one that matches is taken up."""
    first = begin(make(), state="done" if step == 10 else "running", step=step)
    second = begin(make(), EDITED)
    assert second.path == first.path.with_name(first.path.name + ".2")
    assert "other code (src/b.py)" in second.notes[0]
    third = begin(make(), EDITED, "d1")
    assert third.path.name.endswith(".3")
    assert "other data" in third.notes[1]
    assert claim(make(), EDITED, "d0").path == second.path
    back = claim(make(), CODE, "d0")
    assert (back.path, back.finished) == (first.path, step == 10)


def test_other_code_under_an_explicit_name(make: Make) -> None:
    """RUN-8: refused with 8; `resume=allow_code` goes on and says so."""
    begin(make(run_name="one"))
    with pytest.raises(UserError, match=r"src/b\.py.*resume=allow_code") as refused:
        claim(make(run_name="one"), EDITED, "d0")
    assert refused.value.code == 8
    allowed = claim(make(run_name="one", resume="allow_code"), EDITED, "d0")
    assert (allowed.path.name, allowed.attempt) == ("one", 2)
    assert any("src/b.py" in note for note in allowed.notes)


def test_explicit_name_and_other_values(make: Make) -> None:
    """RUN-9, RUN-2: a diff and 8, or one line each; more steps go on, fewer are finished."""
    begin(make(run_name="one"), state="done", step=10)
    with pytest.raises(UserError) as refused:
        claim(make(run_name="one", seed=1, model__rope_theta=5.0, optimizer__lr=1.0), CODE, "d0")
    assert refused.value.code == 8
    text = str(refused.value)
    assert "seed: 0 -> 1" in text
    assert "model.rope_theta: 10000.0 -> 5.0" in text
    assert "optimizer.lr" not in text
    more = claim(make(run_name="one", max_steps=20, optimizer__lr=1.0), CODE, "d0")
    assert (more.finished, more.attempt) == (False, 2)
    rate = f"goes on with optimizer.lr: {make().optimizer.lr} -> 1.0"
    assert more.notes == ["goes on with max_steps: 10 -> 20", rate]
    more.release()
    assert claim(make(run_name="one", max_steps=5), CODE, "d0").finished


def test_a_finished_run_says_which_keys_it_did_not_use(make: Make) -> None:
    """RUN-2: another learning rate under the same `run_name` is not silently taken for what was trained."""
    begin(make(run_name="one"), state="done", step=10)
    again = claim(make(run_name="one", optimizer__lr=0.125), CODE, "d0")
    assert again.finished
    assert again.notes[0] == f"not used: optimizer.lr: {make().optimizer.lr} -> 0.125"
    assert len(claim(make(run_name="one"), CODE, "d0").notes) == 1


@pytest.mark.parametrize("key", ["init_from", "resume"])
def test_a_missing_source_is_refused_before_anything_is_written(make: Make, tmp_path: Path, key: str) -> None:
    """CKPT-5, CKPT-13, RUN-3: exit 8 with what to type; no directory, no new attempt."""
    (tmp_path / "source").mkdir()
    for name, words in (("nowhere", "there is no such directory"), ("source", "meta.json cannot be read")):
        with pytest.raises(UserError, match=words) as refused:
            claim(make(run_name="one", **{key: f"{tmp_path}/{name}"}), CODE, "d0")
        assert refused.value.code == 8
        assert f"type {key}=" in str(refused.value)
    assert not (tmp_path / "one").exists()


def test_init_from_is_not_asked_for_once_there_is_a_checkpoint(make: Make, tmp_path: Path) -> None:
    """CKPT-13: weights that were read at step 0 may be gone when the run is resumed."""
    source = tmp_path / "weights.safetensors"
    source.touch()
    config = make(run_name="one", init_from=str(source))
    run = begin(config).path
    source.unlink()
    with pytest.raises(UserError, match="init_from"):
        claim(config, CODE, "d0")
    (run / "checkpoints" / "step-00000004").mkdir(parents=True)
    taken = claim(config, CODE, "d0")
    taken.release()
    assert taken.attempt == 2


def test_a_full_disk_is_told(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """RUN-6: where even `status.json` cannot be written, one line and code 1 instead of a traceback."""

    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "status.json")

    monkeypatch.setattr(launch, "find_and_run", full)
    assert launch.run_one(make(), []) == 1
    assert "cannot be written: [Errno 28] No space left on device" in capsys.readouterr().err


def test_a_full_disk_leaves_no_run_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RUN-6: where no second file has room, `status.json` is written over; other errors are raised."""
    Status("running", 1, "d" * 64).write(tmp_path)

    def refuse(number: int) -> None:
        def write_text(self: Path, *args: object, **options: object) -> int:
            raise OSError(number, os.strerror(number), str(self))

        monkeypatch.setattr(Path, "write_text", write_text)

    refuse(errno.ENOSPC)
    Status("failed", 1, "d" * 64, exit_code=1).write(tmp_path)
    assert (read_status(tmp_path) or {})["state"] == "failed"
    Status("done", 1, "").write(tmp_path)
    assert (read_status(tmp_path) or {})["config_digest"] == ""
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    refuse(errno.EACCES)
    with pytest.raises(PermissionError):
        Status("running", 1, "").write(tmp_path)
    assert (read_status(tmp_path) or {})["state"] == "done"


def test_a_log_that_cannot_be_copied(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LOG-5, law 6: refused with 3 and the path, before a directory is made."""
    config = make(paths__runs=str(tmp_path / "runs"), logger__copy_to=str(tmp_path / "absent" / "log.txt"))
    assert launch.run_one(config, []) == 3
    said = capsys.readouterr().err
    assert f"logger.copy_to: {tmp_path}/absent/log.txt cannot be written: No such file or directory" in said
    assert list(tmp_path.iterdir()) == []
    launch.check_log_copy(make(logger__copy_to=str(tmp_path / "log.txt")))
    assert (tmp_path / "log.txt").read_text() == ""


def test_kernels_that_a_cpu_cannot_run(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """REG-2: refused with 3 before a directory is made, all at once; a GPU is not asked from here."""
    named = {
        "kernels__attention": "sdpa_cudnn",
        "kernels__rope": "none",
        "paths__runs": str(tmp_path / "runs"),
    }
    assert launch.run_one(make(platform__name="cpu", **named), []) == 3
    said = capsys.readouterr().err
    assert "kernels.attention: sdpa_cudnn runs on cuda, not on cpu" in said
    assert "kernels.rope: there is no implementation 'none'" in said
    assert list(tmp_path.iterdir()) == []
    launch.check_kernels(make(platform__name="cpu", kernels__attention="sdpa_cpu"), "cpu")
    launch.check_kernels(make(**named), "cuda")


@pytest.mark.parametrize("place", ["/proc/none", "/dev/null"])
def test_a_place_that_cannot_be_written(make: Make, place: str) -> None:
    """RUN: one message with the place and what to type, exit 8."""
    with pytest.raises(UserError, match=rf"{place}/.* cannot be written.*paths\.runs=") as refused:
        claim(make(paths__runs=place), CODE, "d0")
    assert refused.value.code == 8


def test_resume_none_refuses_an_unfinished_run(make: Make) -> None:
    """`resume=none` does not go on."""
    begin(make())
    with pytest.raises(UserError, match="resume=none"):
        claim(make(resume="none"), CODE, "d0")


def test_a_sweeps_name_with_another_config(make: Make) -> None:
    """SWEEP-9 names say only what is swept: another learning rate is never taken for a finished run."""
    names = {"sweep__name": "lr", "sweep__job": "seed-0"}
    first = begin(make(**names), state="done", step=10)
    other = claim(make(**names, optimizer__lr=1.0), CODE, "d0")
    assert (other.finished, other.path) == (False, first.path.with_name("seed-0.2"))
    assert "another config (optimizer.lr)" in other.notes[0]


def test_allowed_keys() -> None:
    """RUN-9: what may differ, and what may not, by the table; an optimizer's kind may not, its lr may."""
    old = dict.fromkeys(
        ["seed", "model.hidden_size", "data.packing", "optimizer.kind", "precision.name", "balance.coef"], 0
    )
    fine = dict.fromkeys(
        ["mesh.ep", "optimizer.lr", "data.prefetch", "lr_schedule.horizon", "checkpoint.every"], 0
    )
    allowed, refused = differences({**old, **fine}, dict.fromkeys({**old, **fine}, 1))
    assert [d.key for d in refused] == sorted(old)
    assert [d.key for d in allowed] == sorted(fine)
    allowed, refused = differences({"data.unit": 0}, {"data.unit": 1, "data.allow_change": True})
    assert refused == []
    assert "seed" not in MAY_DIFFER
    moment = {"precision.first_moment": "auto"}
    for old, new, fits in (("master", "split", True), ("split", "master", True), ("fp32", "split", False)):
        allowed, refused = differences({"precision.name": old} | moment, {"precision.name": new})
        assert [d.key for d in allowed + refused] == sorted(["precision.name", *moment])
        assert (refused == []) == fits


def test_unreadable_status_is_unknown(make: Make) -> None:
    """RUN-6: missing or cut off means unknown, never done."""
    run = begin(make(), state="done", step=10).path
    (run / "status.json").write_text('{"state": "do')
    assert read_status(run) is None
    assert not claim(make(), CODE, "d0").finished


def test_code_record(tmp_path: Path) -> None:
    """RUN-7, RUN-8: every source counts, other files do not; no git is no error."""
    (tmp_path / "src" / "deep").mkdir(parents=True)
    (tmp_path / "src" / "deep" / "x.py").write_text("1")
    (tmp_path / "train.py").write_text("1")
    (tmp_path / "README.md").write_text("1")
    first = code_record(tmp_path)
    (tmp_path / "README.md").write_text("2")
    assert code_record(tmp_path).code_identity == first.code_identity
    (tmp_path / "src" / "deep" / "x.py").write_text("2")
    second = code_record(tmp_path)
    assert second.code_identity != first.code_identity
    assert code_differences(first.json(), second.json()) == ["src/deep/x.py"]
    assert (first.commit, first.dirty) == (None, None)
