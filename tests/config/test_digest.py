"""`config.yaml` and its two digests (CFG-14, CFG-15), absolute paths (CFG-13)."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from src.compose import config_digest, dump_config, flatten, identity, load_config, resolve
from src.config import Config
from src.digest import NOT_IDENTITY
from src.errors import UserError
from src.fields import schema_of

CHECKOUT = Path(__file__).resolve().parents[2]


def test_config_yaml_gives_the_config_and_its_digests(base: Config, tmp_path: Path) -> None:
    """CFG-14, CFG-15: writing and loading changes nothing, whatever text and numbers are in it."""
    base.run_name, base.env, base.data.files = (
        "12e5",
        {"TIME": "4:00:00", "OCTAL": "010"},
        ["1:30", "on", "*.txt"],
    )
    base.optimizer.lr, base.optimizer.eps, base.evaluation.prompts = 1e-5, 3e-17, ["yes", "naïve: #1\n\tend"]
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(base))
    loaded = load_config(path)
    assert loaded == base
    assert type(loaded.model) is type(base.model)
    head = dict(line[2:].split(": ") for line in path.read_text().splitlines()[:2])
    assert head == {"config_digest": config_digest(loaded), "identity": identity(loaded)}
    free = {"env", "launcher.extra", "logger.tags"}
    assert set(flatten(base)) == (set(schema_of("deepseek_v2").leaves) - free) | {"env.TIME", "env.OCTAL"}


def test_plain_yaml_would_read_another_number(base: Config) -> None:
    """HYD-6: why there is one reader."""
    base.optimizer.lr = 1e-5
    assert yaml.safe_load("lr: 1e-5")["lr"] == "1e-5"
    assert yaml.safe_load(dump_config(base))["optimizer"]["lr"] == 1e-5


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda text: text.replace("max_steps:", "maxsteps:"), "maxsteps"),
        (lambda text: text.replace("seed: 0", "seed: abc"), "seed"),
        (lambda text: text.replace("timeout: 300s", "timeout: 4:00:00"), "launcher.timeout"),
        (lambda text: text.replace("family: deepseek_v2", "family: other"), "model.family"),
        (lambda text: text.replace("kind: adamw", "kind: AdamW"), "optimizer.kind"),
        (lambda text: text + "run_names: a\n", "run_names"),
        (lambda text: text + "  - broken: [\n", ""),
    ],
)
def test_an_edited_config_yaml_is_refused(
    base: Config, tmp_path: Path, change: Callable[[str], str], key: str
) -> None:
    """CFG-14, HYD-16: loading applies CFG-1 to CFG-6."""
    path = tmp_path / "config.yaml"
    text = dump_config(base)
    assert change(text) != text
    path.write_text(change(text))
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert caught.value.code == 2
    assert key in [problem.key for problem in caught.value.problems] or str(path) in str(caught.value)


def test_a_missing_file_is_a_users_error(tmp_path: Path) -> None:
    """CFG-14: no traceback for a run directory without a config."""
    with pytest.raises(UserError, match="cannot be read"):
        load_config(tmp_path / "config.yaml")


def test_identity_leaves_out_where_and_how(base: Config) -> None:
    """CFG-15: changing any key moves `config_digest`; `identity` moves unless the key says where or how."""
    for key, leaf in schema_of("deepseek_v2").leaves.items():
        other = copy.deepcopy(base)
        node: object = other
        *parents, name = key.split(".")
        for parent in parents:
            node = getattr(node, parent)
        value = getattr(node, name)
        changed = {
            str: f"{value}x",
            int: (value or 0) + 1 if leaf.kind is int and leaf.container is None else 1,
        }
        changed |= {float: 0.123, bool: not value}
        item = changed[leaf.kind]
        setattr(
            node, name, [item] if leaf.container is list else {"a": item} if leaf.container is dict else item
        )
        assert config_digest(other) != config_digest(base), key
        assert (identity(other) == identity(base)) == (key.partition(".")[0] in NOT_IDENTITY), key
    assert len(NOT_IDENTITY) == 13


def test_auto_enters_identity_as_auto(base: Config) -> None:
    """KEY-4: what a machine fills in makes no other run; another axis does."""
    base.mesh.spec = "auto"
    filled, pipelined = copy.deepcopy(base), copy.deepcopy(base)
    filled.mesh.dp, pipelined.mesh.pp = 8, 2
    assert identity(filled) == identity(base) != identity(pipelined)
    assert config_digest(filled) != config_digest(base)


def test_digests_are_equal_in_fresh_processes(base: Config, tmp_path: Path) -> None:
    """CFG-15: under any hash seed; the canonical form is sorted JSON."""
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(base))
    code = (
        "import sys, json; from pathlib import Path; from src.compose import *;"
        "c = load_config(Path(sys.argv[1]));"
        "print(json.dumps([config_digest(c), identity(c)]))"
    )
    for seed in ("0", "1234"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(CHECKOUT)}
        answer = subprocess.run(
            [sys.executable, "-c", code, path], env=environment, capture_output=True, check=True
        )
        assert json.loads(answer.stdout) == [config_digest(base), identity(base)]


def test_paths_become_absolute_once(base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CFG-13: against the launch directory, `~` included; a second resolution elsewhere changes nothing."""
    config = copy.deepcopy(base)
    config.paths.runs, config.paths.data, config.init_from = "out", "~/store", "a.safetensors"
    config.data.files, config.resume, config.logger.copy_to = ["texts/*.txt"], "old/step-1", "log.txt"
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    once = resolve(config)
    assert (once.paths.runs, once.paths.data, once.paths.cache) == (f"{tmp_path}/out", "/home/me/store", None)
    assert (once.init_from, once.data.files) == (f"{tmp_path}/a.safetensors", [f"{tmp_path}/texts/*.txt"])
    assert (once.resume, once.logger.copy_to) == (f"{tmp_path}/old/step-1", f"{tmp_path}/log.txt")
    assert config.paths.runs == "out"
    monkeypatch.chdir("/")
    assert resolve(once) == once
