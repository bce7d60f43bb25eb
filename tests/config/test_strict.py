"""Unknown keys, ill-typed values: all in one message, with what to type (CFG-1 to CFG-7, CFG-13, CFG-16)."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from src import compose, fields
from src.compose import config_loader, typed
from src.conf_files import Source, check_file
from src.config import Config
from src.durations import seconds
from src.errors import UserError
from src.fields import edit_distance, nearest, schema_of
from src.models.schema import FAMILIES
from src.naming import run_name
from tests.config.conftest import Problems

KNOWN = schema_of("deepseek_v2")

REFUSED = [
    # override, key of the problem, rule, a part of what is said
    ("sead=3", "sead", "CFG-1", "did you mean seed?"),
    ("model.hiden_size=64", "model.hiden_size", "CFG-1", "did you mean model.hidden_size?"),
    ("lr=1", "lr", "CFG-1", "did you mean optimizer.lr?"),
    ("+typo=1", "typo", "CFG-1", "unknown key"),
    ("++model.foo=1", "model.foo", "CFG-1", "unknown key"),
    ("+model/extra=x", "model/extra", "CFG-1", "unknown group"),
    ("~max_skips", "max_skips", "HYD-2", "cannot be deleted"),
    ("~optimizer", "optimizer", "HYD-2", "cannot be deleted"),
    ("+max_steps=3", "max_steps", "HYD-1", "type max_steps=3"),
    ("env.NAME=3", "env.NAME", "CFG-1", "type +env.NAME=3"),
    ("data=3", "data", "CFG-6", "has no option 3"),
    ("mesh.spec=pp2", "mesh.spec", "CFG-8", "type mesh=pp2"),
    ("run_name=12e5", "run_name", "CFG-4", """'run_name="12e5"'"""),
    ("sweep.name=1_000", "sweep.name", "CFG-4", """'sweep.name="1_000"'"""),
    ("experiment=true", "experiment", "CFG-6", "has no option True"),
    ("logger.project=true", "logger.project", "CFG-4", """'logger.project="true"'"""),
    ('data.files=[1e3,"b"]', "data.files.0", "CFG-4", "with its quotes"),
    ("launcher.timeout=300", "launcher.timeout", "CFG-5", '"300s"'),
    ("launcher.grace=soon", "launcher.grace", "CFG-5", "no duration"),
    ("dry_run=2", "dry_run", "CFG-6", "takes true or false"),
    ("launcher.force=yes", "launcher.force", "CFG-6", "takes true or false"),
    ("balance.kind=Sequence", "balance.kind", "CFG-6", "none of sequence, micro_batch"),
    ("sequence_length=1e3", "sequence_length", "CFG-6", "type sequence_length=1000"),
    ("micro_batch_size=2.0", "micro_batch_size", "CFG-6", "type micro_batch_size=2"),
    ("checkpoint.every=2.5", "checkpoint.every", "CFG-3", "takes a whole number"),
    ("seed=null", "seed", "CFG-3", "null is not a whole number"),
    ("optimizer.lr=fast", "optimizer.lr", "CFG-3", "takes a number"),
    ("optimizer.eps=inf", "optimizer.eps", "CFG-3", "finite"),
    ("optimizer.betas=0.9", "optimizer.betas", "CFG-3", "'optimizer.betas=[0.9]'"),
    ("paths=here", "paths", "CFG-1", "is a section"),
    ("data.ids=1,2", "data.ids", "HYD-7", "-m data.ids=1,2"),
    ("paths.runs=a,b", "paths.runs", "HYD-7", """'paths.runs="a,b"'"""),
    ("mesh=pp2,ep2", "mesh", "HYD-7", "-m mesh=pp2,ep2"),
    ("resume=out/step=100", "resume", "HYD-8", """'resume="out/step=100"'"""),
    ("+env.HF_TOKEN=abc", "env.HF_TOKEN", "CFG-16", "environment variables only"),
    ("init_from=hf_abcdefghijklmnopqrstuvwx", "init_from", "CFG-16", "looks like a secret"),
    ("tokenizer.path='${oc.env:WANDB_API_KEY,x}'", "tokenizer.path", "CFG-16", "would read a secret"),
    ("tokenizer.revision='${seed}'", "tokenizer.revision", "CFG-13", "is an expression"),
]


def test_every_bad_override_comes_in_one_message(problems: Problems) -> None:
    """CFG-1 to CFG-6, HYD-1 to HYD-8: forty mistakes, one refusal, each with its rule and its way out."""
    found = problems(*(override for override, *_ in REFUSED))
    for override, key, rule, words in REFUSED:
        assert key in found, override
        assert found[key].rule == rule, found[key]
        assert words in str(found[key]), found[key]
    assert set(found) == {key for _, key, _, _ in REFUSED}


def test_secrets_are_not_repeated(problems: Problems) -> None:
    """CFG-16: the message that refuses a secret does not print it."""
    secret = "hf_abcdefghijklmnopqrstuvwx"
    assert secret not in str(problems(f"init_from={secret}")["init_from"])


def test_falsy_values_are_values() -> None:
    """CFG-3: null, 0, false and the empty string arrive; CFG-4: text that looks like a number stays."""
    config = compose.compose(
        [
            *(
                "seed=0",
                "balance.coef=0",
                "lr_schedule.warmup=0",
                "optimizer.max_norm=null",
                "launcher.force=false",
            ),
            *(
                'logger.project=""',
                "run_name=007",
                "sweep.name=2024",
                "paths.runs='1e3'",
                "optimizer.lr=1e-5",
            ),
            *(
                "launcher.timeout=4:00:00",
                "+env.OMP_NUM_THREADS=3",
                "+logger.tags.who=me",
                "optimizer.betas=[0,0.5]",
            ),
        ]
    ).config
    assert (config.seed, config.balance.coef, config.lr_schedule.warmup) == (0, 0.0, 0)
    assert config.optimizer.max_norm is None
    assert config.logger.project == ""
    assert (config.run_name, config.sweep.name, Path(config.paths.runs).name) == ("007", "2024", "1e3")
    assert config.optimizer.lr == 1e-5
    assert config.optimizer.betas == [0.0, 0.5]
    assert isinstance(config.balance.coef, float)
    assert seconds(config.launcher.timeout) == 4 * 3600
    assert (config.env, config.logger.tags) == ({"OMP_NUM_THREADS": "3"}, {"who": "me"})
    assert run_name(config) == "007"


def test_files_are_held_to_the_same_rules(tmp_path: Path) -> None:
    """CFG-1, CFG-4, CFG-5, HYD-4: a file's typo, sexagesimal, octal and bool-like text, with its line."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "run_name: 1:30\nmax_steps: 010\nlauncher:\n  timeout: 4:00:00\n  grace: '4:00:00'\n  froce: true\n"
        "logger:\n  project: on\n  tags: {a: 1:30}\ndry_run: yes\ndata:\n  files: [1e3, ok]\n"
        "env: {TIME: '1:30'}\n"
    )
    found = {problem.key: str(problem) for problem in check_file(Source(file, ""), KNOWN)}
    assert set(found) == {
        *("run_name", "max_steps", "launcher.timeout", "launcher.froce", "logger.project", "logger.tags.a"),
        *("dry_run", "data.files.0"),
    }
    assert f"{file}:2" in found["max_steps"]
    assert "010 would be read as 8" in found["max_steps"]
    assert 'timeout: "4:00:00"' in found["launcher.timeout"]
    assert "launcher.force" in found["launcher.froce"]


def test_missing_values_are_reported_together() -> None:
    """CFG-7: every ??? that is left, with the group that should have set it."""
    tree = OmegaConf.structured(Config)
    OmegaConf.update(tree, "paths.runs", "???")
    with pytest.raises(UserError) as caught:
        typed(tree)
    assert [problem.key for problem in caught.value.problems] == ["model.family", "model.name", "paths.runs"]
    assert "choose a model=MODEL" in str(caught.value)


def test_a_composed_tree_is_walked() -> None:
    """CFG-1, HYD-2: keys that reach or leave the tree past the command line are found in it."""
    with config_loader() as loader:
        from hydra.types import RunMode

        tree = loader.load_configuration("train", ["+model.extra=1", "~seed"], RunMode.RUN)
    with pytest.raises(UserError) as caught:
        typed(tree)
    assert {problem.key for problem in caught.value.problems} == {"model.extra", "seed"}


def test_renamed_keys_say_so(problems: Problems, monkeypatch: pytest.MonkeyPatch) -> None:
    """CFG-13: a former name is refused with the new one and the version."""
    monkeypatch.setitem(fields.RENAMED, "steps", ("max_steps", "0.2"))
    assert "renamed to max_steps in version 0.2" in problems("steps=3")["steps"].message


def test_nearest_key() -> None:
    """CFG-1: edit distance, the same leaf elsewhere, and nothing where nothing is near."""
    assert (edit_distance("sead", "seed"), edit_distance("kitten", "sitting"), edit_distance("", "abc")) == (
        1,
        3,
        3,
    )
    assert nearest("every", KNOWN) in ("logger.every", "checkpoint.every", "evaluation.every")
    assert nearest("optimizer.weigth_decay", KNOWN) == "optimizer.weight_decay"
    assert nearest("zzzzzz", KNOWN) is None


def test_no_option_reads_as_a_bool() -> None:
    """CFG-6: no key, member or option is spelled like one of YAML's bools."""
    words = {"on", "off", "yes", "no", "y", "n", "true", "false"}
    members = {choice for leaf in KNOWN.leaves.values() for choice in leaf.choices}
    parts = {part for key in KNOWN.leaves for part in key.split(".")}
    files = {file.stem for file in compose.CONF.rglob("*.yaml")}
    assert not words & (members | parts | files)
    assert set(FAMILIES) == {"deepseek_v2", "qwen3_moe", "gpt_oss", "dense", "hf"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90m", 5400),
        ("1d12h", 129600),
        ("02:30:00", 9000),
        ("1-12:00:00", 129600),
        ("300s", 300),
        ("1h1s", 3601),
    ],
)
def test_durations(text: str, expected: int) -> None:
    """CFG-5: four spellings, one parser."""
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "300", "m", "1m1h", "1:30", "1.5h", "-5m", "nan", "1:60:00", "5 m"])
def test_no_durations(text: str) -> None:
    """CFG-5: bare digits and all else are refused."""
    with pytest.raises(ValueError, match="no duration"):
        seconds(text)
