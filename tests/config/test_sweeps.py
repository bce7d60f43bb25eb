"""Jobs of a sweep compose to what each composes to alone, and share what they have in common (SWEEP-1)."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TextIO

import pytest
from hydra.types import RunMode
from omegaconf import OmegaConf

from src.command_line import main
from src.compose import compose, compose_jobs, config_digest, config_loader, finish, typed
from src.config import Config
from src.errors import UserError
from src.launchers.jobs import Job
from src.launchers.sweep import plan_jobs
from src.models.counts import count
from src.trainer.data import keys

MIXED = [
    *(
        [f"seed={seed}", f"mesh={mesh}", f"model={model}"]
        for seed, mesh, model in product((0, 7), ("single", "pp2ep2"), ("deepseek_v2", "deepseek_v2/lite"))
    ),
    ["experiment=probe_copy", "seed=3"],
    ["seed=3", "experiment=probe_copy", "optimizer.lr=0.5", "mesh=ep2", "micro_batch_size=1"],
    ["optimizer=sgd", "+env.A='1'", "+logger.tags.b=c", "lr_schedule=wsd"],
    ["++env.A='2'", "data=synthetic", "data.ids=48", "model.num_layers=3"],
    ["optimizer=sgd", "mesh=ep2", "mesh.pp=2", "optimizer.lr=1e-3"],
    ["launcher=slurm", "launcher.time=90m", "max_steps=7"],
    ["data=text_files", 'data.files=["a b/*.txt","c=d.txt"]', "tokenizer=bytes"],
    ["max_steps=7", "+env.A='1'", "optimizer.betas=[0.5,0.6]"],
    [],
]
"""Seeds, meshes, sizes, experiments, additions, lists; the same choices come back with other values."""


def by_hydra(job: list[str]) -> Config:
    """The job composed by Hydra's own loader from first to last."""
    with config_loader() as loader:
        return finish(typed(loader.load_configuration("train", job, RunMode.RUN, from_shell=False)))


@pytest.mark.slow
def test_each_job_is_as_if_composed_alone() -> None:
    """SWEEP-1: whatever jobs share, in either order, none sees the values of another."""
    with config_loader() as loader:
        together = compose_jobs(loader, MIXED)
        backwards = compose_jobs(loader, MIXED[::-1])[::-1]
    alone = [by_hydra(job) for job in MIXED]
    assert together == alone
    assert backwards == alone
    assert [config_digest(config) for config in together] == [config_digest(config) for config in alone]
    assert compose(MIXED[0]).config == alone[0]


def test_jobs_do_not_share_what_can_change() -> None:
    """SWEEP-1: a list or mapping of one job's config is not another's."""
    with config_loader() as loader:
        first, second = compose_jobs(loader, [["seed=0"], ["seed=1"]])
    first.env["A"] = "1"
    first.optimizer.betas.append(0.5)
    assert second.env == {}
    assert len(second.optimizer.betas) == 2


def test_a_file_is_read_once_for_all_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SWEEP-1: four more seeds read no further file; nor does Hydra compose each job beside us."""
    monkeypatch.chdir(tmp_path)
    read: list[str] = []
    load = OmegaConf.load

    def counted(file: TextIO) -> object:
        read.append(file.name)
        return load(file)

    monkeypatch.setattr(OmegaConf, "load", counted)
    counts = []
    for seeds in ("0,1", "0,1,2,3,4,5"):
        read.clear()
        assert main(["-m", "dry_run=true", "data=synthetic", f"seed={seeds}"]) == 0
        counts.append(len(read))
    assert counts[0] == counts[1] > 0


def test_a_corpus_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """SWEEP-2: the jobs' plans hash the same files once, and another corpus on its own."""
    looks: list[str] = []
    find = keys.stdlib_files
    monkeypatch.setattr(keys, "stdlib_files", lambda: looks.append("stdlib") or find()[:20])
    words = [["seed=0"], ["seed=1"], ["data.split_seed=5"], ["data=synthetic"]]
    with config_loader() as loader:
        configs = compose_jobs(loader, words)
    plans = plan_jobs([Job(config, word, {}) for config, word in zip(configs, words, strict=True)])
    assert looks == ["stdlib"]
    assert plans[0].data_key == plans[1].data_key == keys.data_key(configs[0])
    assert plans[2].data_key not in (plans[0].data_key, None)
    assert plans[3].data_key is None


def test_a_dry_run_of_a_sweep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """CFG-17: one plan a job as text and JSON, nothing written."""
    monkeypatch.chdir(tmp_path)
    assert main(["-m", "dry_run=true", "data=synthetic", "seed=0,1", "mesh=single,ep2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    plans = [json.loads(line) for line in lines if line.startswith("{")]
    names = [Path(plan["run_directory"]).name for plan in plans]
    assert names == [f"seed-{seed}-mesh-{mesh}" for seed in (0, 1) for mesh in ("single", "ep2")]
    assert [plan["world"] for plan in plans] == [1, 2, 1, 2]
    assert os.listdir(tmp_path) == []


def test_an_experiment_says_what_is_swept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DENSE-1, SWEEP-9: two models at three seeds by `-m` alone; typed values win over those of the file."""
    monkeypatch.chdir(tmp_path)
    words = ["-m", "dry_run=true", "experiment=ten_minutes", "data=synthetic", "tokenizer=none"]
    for typed_too, seeds in (([], (0, 1, 2)), (["seed=4,5"], (4, 5))):
        assert main([*words, *typed_too]) == 0
        plans = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
        names = [Path(plan["run_directory"]).name for plan in plans]
        assert names[: len(seeds)] == [f"model-deepseek_v2-seed-{seed}" for seed in seeds]
        assert [name.rpartition("-")[0] for name in names[len(seeds) :]] == [
            f"model-dense-twin-seed-{seed}" for seed in seeds
        ]
        assert {str(plan["match"]["wanted"]) for plan in plans[len(seeds) :]} == {
            str(plans[0]["parameters"]["active"])
        }


def test_the_ten_minutes_are_fair() -> None:
    """DENSE-1: the two models meet the same data, tokenizer, steps, tokens, schedule and learning rate."""
    jobs = [[f"model={model}", "experiment=ten_minutes"] for model in ("deepseek_v2", "dense/twin")]
    with config_loader() as loader:
        mixture, twin = compose_jobs(loader, jobs)
    assert replace(mixture, model=twin.model) == twin
    wanted, found = count(mixture.model).active, count(twin.model).active
    assert abs(found / wanted - 1) < 1e-3


def test_all_bad_jobs_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SWEEP-1: problems of every job, not of the first one that Hydra would stop at."""
    with config_loader() as loader, pytest.raises(UserError) as refused:
        compose_jobs(loader, [["seed=x"], ["seed=1"], ["mesh=pp3ep5"], ["optimizer=adam"]])
    text = str(refused.value)
    assert all(f"[{job}]" in text for job in ("seed=x", "mesh=pp3ep5", "optimizer=adam"))
    assert "[seed=1]" not in text
