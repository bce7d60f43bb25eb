"""Mesh specs, families and sizes, precedence, site file, experiments, `conf/` as data (CFG-8 to CFG-13)."""

from __future__ import annotations

import json
import re
from dataclasses import fields, is_dataclass
from itertools import permutations, product
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml

from src import compose as composing
from src import reserved
from src.compose import CONF, compose, compose_jobs, config_loader
from src.config import Config, MeshConfig
from src.errors import UserError
from src.help import options
from src.mesh_spec import canonical, is_spec, parse
from src.models.schema import DeepseekV2Config
from src.reserved import RESERVED
from src.validate import validate
from tests.config.conftest import Problems

GROUPS = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir())


@pytest.mark.parametrize("pairs", list(permutations(["pp2", "ep3", "dp4"])))
def test_specs_take_any_order(pairs: tuple[str, ...]) -> None:
    """CFG-8: any order of the axes, one canonical name in design order."""
    assert canonical(parse("".join(pairs))) == "pp2dp4ep3"


@pytest.mark.parametrize(
    "name",
    ["", "pp", "pp0", "pp02", "2pp", "pp2pp2", "pp2xx", "pp2 ep2", "PP2", "pp-2", "single", "auto", "pp2."],
)
def test_no_specs(name: str) -> None:
    """CFG-8: the grammar takes nothing else."""
    assert not is_spec(name)
    with pytest.raises(ValueError, match="axis-number pairs"):
        parse(name)


def test_specs_compose() -> None:
    """CFG-8: names become canonical, `pp1` is `single`, sizes may be overridden, `auto` stays `auto`."""
    with config_loader() as loader:
        jobs = [
            ["mesh=ep2pp2"],
            ["mesh=pp1"],
            ["mesh=ep2", "mesh.pp=4"],
            ["mesh=auto"],
            ["mesh=single", "mesh.dp=2"],
        ]
        meshes = [config.mesh for config in compose_jobs(loader, jobs)]
    assert [mesh.spec for mesh in meshes] == ["pp2ep2", "single", "pp4ep2", "auto", "dp2"]
    assert [mesh.world for mesh in meshes] == [4, 1, 8, 1, 2]


def test_a_bad_spec_shows_the_grammar(problems: Problems) -> None:
    """CFG-8: not only the two files."""
    assert "axis-number pairs over pp rep dp cp ep tp" in problems("mesh=pp2x")["mesh"].fix


def test_no_file_is_named_like_a_spec() -> None:
    """CFG-8: it would hide the spec."""
    assert not [name for name in options("mesh") if is_spec(name)]
    assert options("mesh") == ["auto", "single"]


def test_families_and_sizes(base: Config) -> None:
    """CFG-9: a size is its family with the differences; the class is the family's own."""
    lite = compose(["model=deepseek_v2/lite"]).config.model
    assert isinstance(base.model, DeepseekV2Config)
    assert isinstance(lite, DeepseekV2Config)
    assert (base.model.name, lite.name, lite.family) == ("deepseek_v2", "deepseek_v2/lite", "deepseek_v2")
    assert (lite.hidden_size, lite.q_lora_rank, lite.yarn.factor) == (2048, None, base.model.yarn.factor)
    for file in (CONF / "model").rglob("*.yaml"):
        first = yaml.safe_load(file.read_text())["defaults"][0]
        family = file.relative_to(CONF / "model").parts[0].removesuffix(".yaml")
        kind = "/schema/model" if file.parent.name == "model" else "/model"
        assert first == f"{kind}/{family}@_here_", file


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CFG-10: one key set in all six places; each place wins over those before it."""
    conf = tmp_path / "conf"
    (conf / "experiment").mkdir(parents=True)
    for folder in CONF.iterdir():
        if folder.is_dir() and folder.name not in ("experiment", "logger"):
            (conf / folder.name).symlink_to(folder)
    (conf / "logger").mkdir()
    root = (CONF / "train.yaml").read_text()
    site = tmp_path / "site-home" / "manyhead" / "site" / "default.yaml"
    site.parent.mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "site-home"))
    monkeypatch.setattr(composing, "CONF", conf)
    steps = [
        (conf / "train.yaml", root.replace("\ndata:", "\nlogger: {every: 2}\ndata:"), 2),
        (conf / "logger" / "none.yaml", "every: 3\n", 3),
        (site, "logger: {every: 4}\n", 4),
        (conf / "experiment" / "mine.yaml", "# @package _global_\nexperiment: mine\nlogger: {every: 5}\n", 5),
    ]
    (conf / "train.yaml").write_text(root)
    (conf / "logger" / "none.yaml").write_text("kinds: []\n")
    (conf / "experiment" / "mine.yaml").write_text("# @package _global_\nexperiment: mine\n")
    assert compose(["experiment=mine"]).config.logger.every == 10
    for file, text, expected in steps:
        file.write_text(text)
        assert compose(["experiment=mine"]).config.logger.every == expected, file
    assert compose(["experiment=mine", "logger.every=6"]).config.logger.every == 6


def test_site_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problems: Problems) -> None:
    """CFG-11: a partial file removes no default, a forbidden or misspelt key is named with file and line."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "manyhead" / "site" / "default.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(f"paths:\n  data: {tmp_path}/store\nlauncher:\n  slots: 3\n")
    config = compose([]).config
    assert (config.paths.data, config.launcher.slots, config.launcher.name) == (
        f"{tmp_path}/store",
        3,
        "local",
    )
    assert config.paths.runs.endswith("/runs")
    file.write_text(
        "defaults:\n  - override /logger: tensorboard\n  - override /optimizer: sgd\n"
        "seed: 3\noptimizer: {lr: 1.0}\nlauncher: {slots: 3}\nlogger: {evry: 3}\nhydra: {mode: RUN}\n"
    )
    found = problems()
    assert set(found) == {"optimizer", "seed", "optimizer.lr", "logger.evry", "hydra"}
    assert (found["seed"].rule, found["logger.evry"].rule) == ("CFG-11", "CFG-1")
    assert f"{file}:4" in found["seed"].message
    file.write_text("defaults:\n  - override /logger: tensorboard\n")
    assert compose([]).config.logger.kinds == ["tensorboard"]


def test_experiments_compose() -> None:
    """CFG-12: command, hardware and speed come first; then deltas and `override` entries; no launcher."""
    names = options("experiment")
    with config_loader() as loader:
        configs = compose_jobs(loader, [[f"experiment={name}"] for name in names])
    for name, config in zip(names, configs, strict=True):
        text = (CONF / "experiment" / f"{name}.yaml").read_text()
        head = [line for line in text.splitlines()[:5] if line.startswith("# ")]
        assert head[0] == "# @package _global_"
        many = "-m " if "sweeper" in text else ""
        assert head[1] == f"# python train.py {many}experiment={name}"
        assert "minute" in head[2] or "tokens/s" in head[2]
        assert config.experiment == name
        assert "launcher" not in text
        for entry in yaml.safe_load(text)["defaults"]:
            assert entry == "_self_" or next(iter(entry)).startswith("override /"), entry
    probes = {config.experiment: config for config in configs if config.experiment}
    for name in ("copy", "rules"):
        probe = probes[f"probe_{name}"]
        assert (probe.data.rule, probe.data.ids, probe.sequence_length) == (name, 64, 64)
        assert probe.model.vocab_size == 64


def test_every_option_composes() -> None:
    """CFG-12: the k-th option of every group together, so that each composes."""
    skipped = ("experiment", "tokenizer", "data")
    choices = {name: options(name) for name in GROUPS if name not in skipped}
    choices["model"].remove("hf")  # It wants a directory: tests/backends/test_local.py.
    texts = ["data=text_files", 'data.files=["a"]']
    for k in range(max(len(found) for found in choices.values())):
        job = [f"{name}={found[k % len(found)]}" for name, found in choices.items()]
        if "backend=transformers" in job:
            job = [word for word in job if not word.startswith(("precision=", "recompute=", "balance="))]
        if "launcher=direct" in job or ("container=pyxis" in job and "launcher=slurm" not in job):
            job = [word for word in job if not word.startswith("container=")]
        job += ["container.image=lab/torch:2"]
        job += [["data=synthetic"], ["tokenizer=bytes", *texts], ["data=stdlib", "tokenizer=bpe"]][k % 3]
        assert compose(job).config.model.vocab_size is not None


@pytest.mark.parametrize("model", options("model"))
def test_every_mesh_composes_or_is_refused_by_a_rule(model: str, tmp_path: Path) -> None:
    """CFG-12: model x mesh x schedule; a refusal names its rule and what to type."""
    words = [f"model={model}"]
    if model == "hf":
        told = {
            "model_type": "llama",
            "vocab_size": 8192,
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
        }
        (tmp_path / "config.json").write_text(json.dumps(told))
        words += [f"model.path={tmp_path}", "backend=transformers", "balance=none"]
    config = compose(words).config
    accepted = 0
    for axes in product((1, 2, 3, 4), (1, 2), (1, 2), (1, 3, 8), ("gpipe", "1f1b")):
        config.mesh = MeshConfig(pp=axes[0], rep=axes[1], dp=axes[2], ep=axes[3])
        config.pipeline.schedule = str(axes[4])
        found = validate(config)
        assert all(problem.rule and problem.fix for problem in found), found
        accepted += not found
    assert 8 <= accepted < 96


def test_conf_is_data() -> None:
    """CFG-13: no expression but `oc.env` with a default, in any file."""
    for file in CONF.rglob("*.yaml"):
        for expression in re.findall(r"\$\{[^}]*\}", file.read_text()):
            assert re.fullmatch(r"\$\{oc\.env:[A-Z_]+,[^}]*\}", expression), (file, expression)


def test_defaults_list_and_readme_name_every_group_and_option() -> None:
    """KEY-2, DOC-3: `train.yaml` chooses for every group, and `conf/README.md` has a row for every option."""
    entries = yaml.safe_load((CONF / "train.yaml").read_text())["defaults"]
    chosen = {key: value for entry in entries if isinstance(entry, dict) for key, value in entry.items()}
    sections = [item.name for item in fields(Config) if is_dataclass(get_type_hints(Config)[item.name])]
    assert set(GROUPS) - {"experiment"} <= set(chosen)
    assert set(sections) - set(GROUPS) == {"paths", "debug", "spike"}
    rows: dict[str, dict[str, str]] = {}
    group = ""
    for line in (CONF / "README.md").read_text().splitlines():
        match = re.fullmatch(r"\| (?:`(\w+)`)? ?\| `([\w/]+)`( \(default\))? \| (.+) \|", line)
        if match:
            group = match[1] or group
            rows.setdefault(group, {})[match[2]] = match[4]
            assert bool(match[3]) == (chosen.get(group) == match[2]), line
    assert {name: sorted(found) for name, found in rows.items()} == {
        name: sorted(options(name)) for name in GROUPS
    }


def test_reserved_names_are_refused_with_a_reason() -> None:
    """CFG-2: nothing pretends to work; the message says why and what exists."""
    names = [(group, name, reason) for group in RESERVED for name, reason in RESERVED[group].items()]
    with pytest.raises(UserError) as caught:
        compose([f"{group}={name}" for group, name, _ in names])
    assert len(caught.value.problems) == len(names)
    for (group, name, reason), problem in zip(names, caught.value.problems, strict=True):
        assert problem.key == group
        assert name in problem.message
        assert reason in problem.message
        assert f"{group}=" in problem.fix


def test_reserved_names_are_refused_as_values(base: Config) -> None:
    """CFG-2: the same names set by key instead of by group."""
    base.backend.name = "megatron"
    base.logger.kinds, base.optimizer.kind = ["mlflow", "wandb"], "muon"
    found = {problem.key: problem.message for problem in reserved.check(base)}
    assert set(found) == {
        *(
            "backend.name",
            "logger.kinds",
            "optimizer.kind",
        )
    }
    assert "mlflow is reserved" in found["logger.kinds"]


def test_split_seed_of_the_shell(monkeypatch: pytest.MonkeyPatch, base: Config) -> None:
    """SEED-3: the shell's split seed is the default of `data.split_seed` only, and is recorded."""
    monkeypatch.setenv("MANYHEAD_SPLIT_SEED", "7")
    assert compose([]).config.data.split_seed == 7
    assert compose(["data.split_seed=8"]).config.data.split_seed == 8
    assert base.data.split_seed == 42
