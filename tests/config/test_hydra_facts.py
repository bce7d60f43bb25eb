"""What Hydra and OmegaConf do alone (HYD-1 to HYD-18): a check for each, so that an upgrade is noticed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from src.compose import config_loader
from src.config import Config
from src.launchers import sweep
from src.overrides import parse

MODEL = ["model.family=deepseek_v2"]


@pytest.fixture
def load() -> Callable[..., DictConfig]:
    """Hydra's own composition, without our checks."""

    def ask(*overrides: str) -> DictConfig:
        with config_loader() as loader:
            return loader.load_configuration("train", list(overrides), RunMode.RUN)

    return ask


def without_hydra(tree: DictConfig) -> Any:
    """The dataclass that `to_object` makes of the root."""
    with open_dict(tree):
        del tree["hydra"]
    return OmegaConf.to_object(tree)


def test_additions_and_deletions_pass(load: Callable[..., DictConfig]) -> None:
    """HYD-1: an added key is accepted and then lost; HYD-2: a deleted one silently has its default again."""
    tree = load("+sead=1", "++model.foo=1", "~seed")
    assert (tree.sead, tree.model.foo, "seed" in tree) == (1, 1, False)
    config = without_hydra(tree)
    assert isinstance(config, Config)
    assert "sead" not in asdict(config)
    assert config.seed == 0


def test_text_is_altered(load: Callable[..., DictConfig]) -> None:
    """HYD-3: numbers in a text key are rewritten; HYD-5: 2 is a bool; HYD-6: 1e-5 is a float."""
    tree = load(
        "run_name=12e5", "sweep.name=1_000", "sweep.job=007", "init_from=on", "dry_run=2", "optimizer.lr=1e-5"
    )
    assert (tree.run_name, tree.sweep.name) == ("1200000.0", "1000")
    assert (tree.sweep.job, tree.init_from, tree.dry_run, tree.optimizer.lr) == ("007", "on", True, 1e-5)
    for value in ("1e3", "10.0"):
        with pytest.raises(ConfigCompositionException):
            load(f"max_steps={value}")


def test_yaml_reads_clocks_and_octals() -> None:
    """HYD-4: a file turns clocks into numbers; HYD-6: only OmegaConf's reader takes 1e-5 for a number."""
    text = "time: 4:00:00\nshort: 1:30\noctal: 010\nact: on\nlr: 1e-5\n"
    tree = OmegaConf.create(text)
    assert (tree.time, tree.short, tree.octal, tree.act, tree.lr) == (14400, 90, 8, True, 1e-5)
    assert yaml.safe_load(text)["lr"] == "1e-5"
    merged = OmegaConf.merge(OmegaConf.structured(Config), {"run_name": tree.time, "init_from": tree.act})
    assert (merged.run_name, merged.init_from) == ("14400", "True")


def test_commas_and_grammar(load: Callable[..., DictConfig]) -> None:
    """HYD-7: a comma is a sweep; HYD-8: which characters need quotes."""
    with pytest.raises(ConfigCompositionException, match="Ambiguous value"):
        load("run_name=a,b")
    parser = OverridesParser.create()
    for value in ("out/step=100", "n[01-03]", "~/x", "a;b", "a#b", "a&b", "a!b", 'a"b'):
        with pytest.raises(OverrideParseException):
            load(f"resume={value}")
        assert parse(f"resume={value}", parser)[1], value
        assert not parse(f"""resume="{value.replace('"', chr(92) + '"')}" """.strip(), parser)[1], value
    for value in ("a%b", "a@b", "a:b", "a+b", "a*b"):
        assert load(f"resume={value}").resume == value


def test_flags_after_overrides() -> None:
    """HYD-9: Hydra's parser takes no override after a flag that follows one."""
    with pytest.raises(SystemExit) as caught:
        get_args_parser().parse_args(["max_steps=1", "-m", "seed=1,2"])
    assert caught.value.code == 2


def test_directories_are_named_by_the_clock(load: Callable[..., DictConfig]) -> None:
    """HYD-10: the second is the finest part of Hydra's own directory."""
    place = OmegaConf.to_container(load(), resolve=False)["hydra"]["run"]["dir"]  # type: ignore[index,call-overload]
    assert "${now:" in place
    assert "%S" in place
    assert "%f" not in place


def app(tmp_path: Path, text: str, words: list[str], task: Callable[[DictConfig], Any]) -> None:
    """Run `hydra.main` in this process on a config of its own."""
    (tmp_path / "conf").mkdir(exist_ok=True)
    (tmp_path / "conf" / "root.yaml").write_text(text)
    before = sys.argv
    sys.argv = ["app.py", *words]
    try:
        hydra.main(version_base="1.3", config_path=str(tmp_path / "conf"), config_name="root")(task)()
    finally:
        sys.argv = before


def group(tmp_path: Path, name: str, **options: str) -> None:
    """A config group with these options."""
    folder = tmp_path / "conf" / name
    folder.mkdir(parents=True, exist_ok=True)
    for option, text in options.items():
        (folder / f"{option}.yaml").write_text(text)


QUIET = """defaults:
  - _self_
  - override hydra/job_logging: disabled
  - override hydra/hydra_logging: disabled
"""


def test_jobs_of_the_basic_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HYD-11: `sys.exit` in a job ends the sweep; HYD-18: runs and sweeps make their directories at once."""
    monkeypatch.chdir(tmp_path)
    seen: list[int] = []

    def task(cfg: DictConfig) -> None:
        seen.append(cfg.n)
        if cfg.n == 0:
            sys.exit(42)

    with pytest.raises(SystemExit) as caught:
        app(tmp_path, QUIET + "n: 5\n", ["-m", "n=0,1", "hydra.sweep.dir=swept"], task)
    assert (caught.value.code, seen) == (42, [0])
    assert (tmp_path / "swept" / "multirun.yaml").is_file()
    app(tmp_path, "n: 5\n", ["hydra.run.dir=ran", "hydra.output_subdir=null"], task)
    assert [file.suffix for file in (tmp_path / "ran").iterdir()] == [".log"]


def test_launchers_are_fixed_before_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HYD-12: without -m a launcher is not called; HYD-13: a swept one is in the config but not in use;
    a group file that sets `hydra.mode` makes a sweep."""
    monkeypatch.chdir(tmp_path)
    ours = "# @package _global_\ndefaults:\n  - override /hydra/launcher: manyhead_local\n"
    ours += "hydra:\n  mode: {mode}\n"
    group(tmp_path, "where", here="{}", run=ours.format(mode="RUN"), sweep=ours.format(mode="MULTIRUN"))
    text = QUIET.replace("  - _self_\n", "  - _self_\n  - where: here\n")
    claimed: list[str] = []

    def run_batch(loader: ConfigLoader, config: DictConfig, jobs: list[list[str]], first: int) -> sweep.Batch:
        claimed.append("ours")
        return sweep.Batch([], 0)

    monkeypatch.setattr(sweep, "run_batch", run_batch)

    def task(cfg: DictConfig) -> None:
        claimed.append(HydraConfig.get().launcher._target_.rpartition(".")[2])

    app(tmp_path, text, ["where=run"], task)
    assert claimed == ["LocalLauncher"]
    app(tmp_path, text, ["-m", "where=here,run"], task)
    assert claimed[1:] == ["BasicLauncher", "LocalLauncher"]
    app(tmp_path, text, ["where=sweep"], task)
    assert claimed[3:] == ["ours"]


def test_experiments_override_absolutely(tmp_path: Path) -> None:
    """HYD-14: a relative group in an experiment is looked for below it."""
    group(tmp_path, "model", a="n: 1\n", x="n: 2\n")
    group(tmp_path, "experiment", bad="# @package _global_\ndefaults:\n  - model: x\n")
    text = QUIET.replace("  - _self_\n", "  - model: a\n  - experiment: null\n  - _self_\n")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with pytest.raises(hydra.errors.MissingConfigException, match="Could not find 'experiment/model/x'"):
            app(tmp_path, text, ["experiment=bad"], lambda cfg: None)
    finally:
        del os.environ["HYDRA_FULL_ERROR"]


def test_errors_exit_1_unless_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """HYD-17: a composition error is exit 1 with the first problem only; a bad flag is exit 2."""
    with pytest.raises(SystemExit) as caught:
        app(tmp_path, "n: 1\n", ["m=1", "k=2"], lambda cfg: None)
    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert "'m'" in said
    assert "'k'" not in said
    with pytest.raises(SystemExit) as caught:
        app(tmp_path, "n: 1\n", ["--no-such-flag"], lambda cfg: None)
    assert caught.value.code == 2


def test_globs_see_files_only() -> None:
    """HYD-15: neither sizes nor specs."""
    with config_loader() as loader:
        assert isinstance(loader, ConfigLoader)
        families = ["deepseek_v2", "dense", "gpt_oss", "hf", "qwen3_moe"]
        assert loader.get_group_options("model", ObjectType.CONFIG) == families
        assert loader.get_group_options("mesh", ObjectType.CONFIG) == ["auto", "single"]


def test_a_config_by_path_is_untyped(tmp_path: Path) -> None:
    """HYD-16: a file that is composed without the schema keeps any value."""
    seen: list[Any] = []
    words = [f"hydra.run.dir={tmp_path}/ran", "hydra.output_subdir=null", "seed=abc"]
    app(tmp_path, QUIET + "seed: 0\n", words, lambda cfg: seen.append(cfg.seed))
    assert seen == ["abc"]
