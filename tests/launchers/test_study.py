"""Adaptive sweeps: what is searched, what Optuna is told, and how a search goes on (SWEEP-10)."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from src.code_identity import CHECKOUT
from src.compose import compose
from src.config import Config, EvaluationConfig
from src.errors import Problem, UserError
from src.launchers import study
from src.launchers.jobs import Job, make_jobs
from src.launchers.optuna_config import SAMPLERS, Settings
from src.launchers.search_space import Domain, read_space
from src.launchers.study import run_study, seed_of
from src.launchers.sweep import Batch
from src.report_facts import AVERAGED

LR = "optimizer.lr=tag(log,interval(1e-4,1e-1))"


@pytest.mark.parametrize(
    ("line", "domain"),
    [
        (LR, Domain(low=1e-4, high=1e-1, log=True)),
        ("x=interval(0,1)", Domain(low=0.0, high=1.0)),
        ("x=int(interval(1,8))", Domain(low=1, high=8)),
        ("x=range(0,7,2)", Domain(low=0, high=6, step=2)),
        ("x=range(0.5,0.1,-0.2)", Domain(low=0.3, high=0.5, step=0.2)),
        ("x=3,a,true,3", Domain(choices=("3", "a", "True"))),
        ("x='a b',null", Domain(choices=("'a b'", "null"))),
    ],
)
def test_domains(line: str, domain: Domain) -> None:
    """SWEEP-10: what Hydra's grammar says, ends included."""
    found = read_space(["max_steps=3", line]).domains[line.partition("=")[0]]
    assert (found.choices, found.step, found.log) == (domain.choices, domain.step, domain.log)
    assert (found.low, found.high) == pytest.approx((domain.low, domain.high))
    assert found.is_whole == domain.is_whole


def test_overrides_of_a_trial() -> None:
    """SWEEP-10, CFG-3: fixed ones as typed, floats in full; a later line for a key wins."""
    space = read_space(["seed=1,2", LR, "+env.A='b c'", "seed=range(0,3)", "mesh=ep2,single"])
    assert space.fixed == ("+env.A='b c'",)
    assert space.overrides({"seed": 2, "optimizer.lr": 0.1 + 0.2, "mesh": "ep2"}) == [
        "+env.A='b c'",
        "seed=2",
        "optimizer.lr=0.30000000000000004",
        "mesh=ep2",
    ]
    assert space.corner() == ["+env.A='b c'", "seed=0", "optimizer.lr=0.0001", "mesh=ep2"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["seed=1"], "no key has several values"),
        (["x=interval(2,1)"], r"interval\(2,1\) spans no values"),
        (["x=tag(log,interval(0,1))"], "spans no values"),
        (["x=tag(log,range(1,9))"], "spans no values"),
        (["x=range(3,3)"], "spans no values"),
        (["mesh=glob(*)"], "spans no values"),
    ],
)
def test_spaces_that_cannot_be_searched(lines: list[str], words: str) -> None:
    """SWEEP-10: refused (2) before anything is asked for."""
    with pytest.raises(UserError, match=words):
        read_space(lines)


def test_objectives_are_columns_of_the_report() -> None:
    """SWEEP-10: the closed set of `sweep.objective` is what the report averages."""
    from src.config import SweepConfig

    assert set(SweepConfig.__dataclass_fields__["objective"].metadata["choices"]) == set(AVERAGED)


BASE = compose(["data=synthetic"]).config


def compose_corner(loader: Any, jobs: Sequence[Sequence[str]]) -> list[Config]:
    """As `compose_jobs` for the few keys that matter here, without the time."""
    config = copy.deepcopy(BASE)
    for line in jobs[0]:
        key, _, value = line.partition("=")
        group, _, name = key.rpartition(".")
        part = getattr(config, group) if group else config
        if key != "data" and key != "optimizer.lr":
            setattr(part, name, {"true": True, "false": False}.get(value.lower(), value))
    config.evaluation = EvaluationConfig("none") if config.evaluation == "none" else config.evaluation
    return [config]


class FakeLauncher:
    """Runs nothing; a job's value is a function of its overrides."""

    def __init__(self, typed: list[str], states: dict[int, tuple[str, int]], refused: str) -> None:
        self._typed, self._states, self._refused = typed, states, refused
        self.batches: list[list[Sequence[str]]] = []
        self.numbers: list[int] = []

    def run(self, overrides: Sequence[Sequence[str]], first: int) -> Batch:
        self.batches.append(list(overrides))
        self.numbers.append(first)
        if any(self._refused in line for job in overrides for line in job):
            raise UserError([Problem("seed", self._refused)])
        jobs = make_jobs([BASE] * len(overrides), overrides, self._typed, first)
        for job in jobs:
            state, code = self._states.get(job.config.sweep.index or 0, ("done", 0))
            job.end(state, code)
        codes = [job.code for job in jobs if job.code]
        return Batch(jobs, codes[0] if codes else 0)


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a study in `tmp_path` over a fake launcher, which is returned with the code."""
    pytest.importorskip("optuna")
    monkeypatch.setattr(study, "compose_jobs", compose_corner)
    monkeypatch.setattr(study, "code_record", lambda: SimpleNamespace(code_identity="this"))

    def value(job: Job) -> float:
        lr = next((float(v) for key, v in job.swept.items() if key == "optimizer.lr"), 1.0)
        return (lr - 0.01) ** 2 if job.state == "done" else float("nan")

    monkeypatch.setattr(study, "objective", value)

    def begin(
        *words: str, states: dict[int, tuple[str, int]] | None = None, refused: str = "none", **keys: Any
    ) -> tuple[int, FakeLauncher]:
        typed = ["data=synthetic", *(words or (LR,)), f"paths.runs={tmp_path}"]
        sampler = OmegaConf.create({**SAMPLERS["tpe"], "seed": 3, "n_startup_trials": 3})
        settings = Settings(**{"sampler": sampler, "n_trials": 7, "n_jobs": 2, **keys})
        launcher = FakeLauncher(typed, states or {}, refused)
        return run_study(None, typed, settings, launcher.run), launcher

    return begin


def rates(launcher: FakeLauncher) -> list[str]:
    return [line for batch in launcher.batches for job in batch for line in job if "lr=" in line]


def test_a_search_in_batches(search: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SWEEP-10: n_jobs at a time, n_trials in all; typed again nothing runs; the table names the best."""
    code, launcher = search()
    assert (code, [len(batch) for batch in launcher.batches]) == (0, [2, 2, 2, 1])
    assert launcher.numbers == [0, 2, 4, 6]
    assert len(set(rates(launcher))) == 7
    text = capsys.readouterr().out
    assert text.count("complete") == 7
    assert "best       trial" in text
    (directory,) = tmp_path.iterdir()
    assert (directory / study.JOURNAL).is_file()
    code, again = search()
    assert (code, again.batches) == (0, [])
    code, more = search(n_trials=8)
    assert [len(batch) for batch in more.batches] == [1]


def test_a_stopped_search_goes_on_as_if_it_had_not_been(search: Any, tmp_path: Path) -> None:
    """SWEEP-4, SWEEP-10: stopped trials first; then a seeded sampler asks for what it would have asked."""
    stopped = {3: ("stopped", 75)}
    code, first = search(states=stopped)
    assert (code, first.numbers) == (75, [0, 2])
    code, second = search()
    assert (code, second.numbers[0]) == (0, 3)
    assert rates(second)[0] == rates(first)[3]
    _, whole = search("max_steps=9", LR)
    assert len(list(tmp_path.iterdir())) == 1
    assert rates(whole)[:4] == rates(first)
    assert len({*rates(first), *rates(second)}) == 7


def test_a_failed_job_is_a_failed_trial(search: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """SWEEP-10, EXIT-2: the search goes on without it; the code is the first failed trial's, also later."""
    failed = {1: ("failed", 42), 4: ("failed", 7)}
    code, launcher = search(states=failed)
    assert (code, len(rates(launcher))) == (42, 7)
    assert capsys.readouterr().out.count("| fail ") == 2
    code, again = search()
    assert (code, again.batches) == (42, [])


def test_fail_fast_ends_a_search(search: Any) -> None:
    """SWEEP-3: with `sweep.fail_fast` the batch of a failed job is the last."""
    code, launcher = search(LR, "sweep.fail_fast=true", states={1: ("failed", 42)})
    assert (code, launcher.numbers) == (42, [0])


def test_equal_trials_are_one_job(search: Any) -> None:
    """SWEEP-1: a small space is asked for the same again; no two jobs share a directory."""
    code, launcher = search("seed=1,2", n_trials=5, n_jobs=3)
    assert code == 0
    assert all(len({tuple(job) for job in batch}) == len(batch) <= 2 for batch in launcher.batches)


def test_a_refused_batch_ends_the_search(search: Any) -> None:
    """SWEEP-1 per batch: the item is named; typed again the search tries something else."""
    with pytest.raises(UserError, match="seed=2"):
        search("seed=1,2", LR, refused="seed=2")
    code, again = search("seed=1,2", LR)
    assert code == 2
    assert again.numbers[0] > 0


@pytest.mark.parametrize(
    ("words", "keys", "message"),
    [
        ((LR, "evaluation=none"), {}, "heldout_loss, but evaluation=none"),
        ((LR, "launcher.wait=false"), {}, "launcher.wait"),
        ((LR,), {"direction": "down", "n_trials": 0}, "(?s)no direction.*n_trials"),
    ],
)
def test_what_is_refused(search: Any, words: tuple[str, ...], keys: dict[str, Any], message: str) -> None:
    """SWEEP-10: before any job, with everything that is wrong."""
    with pytest.raises(UserError, match=message):
        search(*words, **keys)


def test_a_dry_run_writes_nothing(search: Any, tmp_path: Path) -> None:
    """CFG-17: the first batch alone is handed on."""
    code, launcher = search(LR, "dry_run=true")
    assert (code, len(launcher.batches), list(tmp_path.iterdir())) == (0, 1, [])


def test_without_the_package(search: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """EXIT: 3, with what to install."""
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r"pip install -e") as refused:
        search()
    assert refused.value.code == 3


def test_seeds_of_trials() -> None:
    """SWEEP-10: a function of seed and number, apart for all of them."""
    assert len({seed_of(seed, number) for seed in range(9) for number in range(99)}) == 9 * 99
    assert seed_of(3, 5) == seed_of(3, 5)


@pytest.mark.slow
def test_three_trials_on_this_machine(tmp_path: Path) -> None:
    """SWEEP-10, REPORT-1: the whole command, its report, and that jobs side by side shared the machine."""
    pytest.importorskip("optuna")
    words = ["data=synthetic", "data.ids=48", "model.num_layers=2", "sequence_length=32", "max_steps=2"]
    words += ["global_batch_size=4", "evaluation.samples=4", "lr_schedule.warmup=1", f"paths.runs={tmp_path}"]
    words += [
        "launcher.slots=2",
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=3",
        "hydra.sweeper.n_jobs=3",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "train.py", "-m", *words, LR],
        cwd=CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "best       trial" in done.stdout + done.stderr
    assert "has no seed" in done.stdout + done.stderr
    (directory,) = tmp_path.iterdir()
    rows = json.loads((directory / "report.json").read_text())["runs"]
    assert [(row["state"], row["side_by_side"]) for row in rows] == [("done", 2)] * 3
    assert len({row["heldout_loss"] for row in rows}) == 3
    assert "shared machine" in (directory / "report.md").read_text()
