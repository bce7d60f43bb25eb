"""What crosses groups: each bad config is refused by its rule, also under `python -O` (CFG-2)."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest

from src.compose import compose, dump_config
from src.config import Config
from src.validate import validate

CHECKOUT = Path(__file__).resolve().parents[2]

BAD: list[tuple[dict[str, object], str, str]] = [
    # changes, key of the problem, rule
    ({"max_steps": 0}, "max_steps", "range"),
    ({"seed": -1}, "seed", "range"),
    ({"optimizer.lr": 0.0}, "optimizer.lr", "range"),
    ({"optimizer.betas": [0.9, 1.0]}, "optimizer.betas", "range"),
    ({"optimizer.betas": [0.9]}, "optimizer.betas", "range"),
    ({"optimizer.max_norm": 0.0}, "optimizer.max_norm", "range"),
    ({"precision.first_moment": "bf16"}, "precision.first_moment", "OP-4"),
    ({"precision.first_moment": "bf16", "precision.name": "bf16"}, "precision.first_moment", "OP-4"),
    (
        {"precision.first_moment": "bf16", "precision.name": "split", "optimizer.kind": "sgd"},
        "precision.first_moment",
        "OP-4",
    ),
    (
        {"precision.first_moment": "bf16", "precision.name": "master", "optimizer.betas": [0.999, 0.999]},
        "precision.first_moment",
        "OP-4",
    ),
    ({"lr_schedule.floor": 1.5}, "lr_schedule.floor", "range"),
    ({"lr_schedule.warmup": -1}, "lr_schedule.warmup", "range"),
    ({"lr_schedule.kind": "wsd", "max_steps": 29}, "lr_schedule", "CFG-19"),
    ({"lr_schedule.kind": "wsd", "lr_schedule.horizon": 29}, "lr_schedule", "CFG-19"),
    ({"checkpoint.keep_last": 0}, "checkpoint.keep_last", "range"),
    ({"evaluation.samples": 0}, "evaluation.samples", "range"),
    ({"logger.every": 0}, "logger.every", "range"),
    ({"logger.kinds": ["wandbb"]}, "logger.kinds", "LOG-5"),
    ({"launcher.parallel": "many"}, "launcher.parallel", "LOCAL-3"),
    ({"launcher.timeout": "0s"}, "launcher.timeout", "CFG-5"),
    ({"data.prepare.timeout": "00:00:00"}, "data.prepare.timeout", "CFG-5"),
    ({"checkpoint.verify": "64 gigs"}, "checkpoint.verify", "CFG-6"),
    ({"sweep.name": "s", "sweep.job": "../../elsewhere"}, "sweep.job", "SWEEP-9"),
    ({"sweep.keys": ["seed"]}, "sweep.keys", "SWEEP-9"),
    ({"resume": "automatic"}, "resume", "CKPT-5"),
    ({"profile.steps": [3]}, "profile.steps", "PROF-1"),
    ({"profile.steps": [5, 3]}, "profile.steps", "PROF-1"),
    ({"profile.steps": [0, 3]}, "profile.steps", "PROF-1"),
    ({"profile.steps": [3, 13]}, "profile.steps", "PROF-1"),
    ({"profile.steps": [9, 10], "max_steps": 9}, "profile.steps", "PROF-1"),
    ({"profile.ranks": [0, 7]}, "profile.ranks", "PROF-1"),
    ({"profile.memory": True}, "profile.memory", "BENCH-4"),
    ({"profile.memory": True, "profile.steps": [2, 3], "platform.name": "cpu"}, "profile.memory", "BENCH-4"),
    ({"pipeline.overlap": True}, "pipeline.overlap", "ENG-17"),
    ({"sequence_length": 8192}, "sequence_length", "TRAP-9"),
    ({"model.top_k": 9}, "model.top_k", "ROUTE-1"),
    ({"model.num_groups": 5}, "model.num_groups", "ROUTE-1"),
    ({"model.groups_kept": 5}, "model.groups_kept", "ROUTE-1"),
    ({"model.first_dense": 8}, "model.first_dense", "MOD-1"),
    ({"model.qk_rope_head_dim": 7}, "model.qk_rope_head_dim", "ATT-2"),
    ({"mesh.ep": 3}, "mesh.ep", "experts"),
    ({"mesh.tp": 2}, "mesh.tp", "tp"),
    ({"global_batch_size": 15}, "global_batch_size", "batch"),
    ({"data.kind": "mixture"}, "data.kind", "reserved"),
    ({"backend.name": "megatron"}, "backend.name", "reserved"),
]


QWEN: list[tuple[dict[str, object], str, str]] = [
    # as above, for the tiny Qwen3-MoE
    ({"model.num_kv_heads": 4}, "model.num_kv_heads", "ATT-4"),
    ({"model.num_kv_heads": 0}, "model.num_kv_heads", "ATT-4"),
    ({"model.num_kv_heads": 12}, "model.num_kv_heads", "ATT-4"),
    ({"model.head_dim": 15}, "model.head_dim", "ATT-2"),
    ({"model.head_dim": 0}, "model.head_dim", "ATT-2"),
    ({"model.top_k": 17}, "model.top_k", "ROUTE-3"),
    ({"model.top_k": 0}, "model.top_k", "ROUTE-3"),
    ({"model.mlp_only_layers": [3, 8]}, "model.mlp_only_layers", "ROUTE-3"),
    ({"model.mlp_only_layers": [-1]}, "model.mlp_only_layers", "ROUTE-3"),
    ({"model.decoder_sparse_step": 0}, "model.decoder_sparse_step", "ROUTE-3"),
    ({"sequence_length": 8192}, "sequence_length", "TRAP-9"),
    ({"mesh.ep": 3, "global_batch_size": 18}, "mesh.ep", "experts"),
]


GPT_OSS: list[tuple[dict[str, object], str, str]] = [
    # as above, for the tiny gpt-oss
    ({"model.num_kv_heads": 4}, "model.num_kv_heads", "ATT-4"),
    ({"model.head_dim": 15}, "model.head_dim", "ATT-2"),
    ({"model.top_k": 9}, "model.top_k", "ROUTE-4"),
    ({"model.top_k": 0}, "model.top_k", "ROUTE-4"),
    ({"model.sliding_window": 0}, "model.sliding_window", "ATT-6"),
    ({"model.swiglu_limit": 0.0}, "model.swiglu_limit", "FFN-1"),
    ({"model.intermediate_size": 176}, "model.intermediate_size", "TRAP-6"),
    ({"mesh.ep": 3, "global_batch_size": 18}, "mesh.ep", "experts"),
]


DENSE: list[tuple[dict[str, object], str, str]] = [
    ({"model.num_kv_heads": 3}, "model.num_kv_heads", "ATT-4"),
    ({"model.head_dim": 15}, "model.head_dim", "ATT-2"),
    ({"model.intermediate_size": 0}, "model.intermediate_size", "DENSE-1"),
    ({"mesh.ep": 2}, "mesh.ep", "experts"),
]


@pytest.fixture(scope="module")
def gpt_oss() -> Config:
    """The tiny gpt-oss as a command composes it."""
    return compose(["model=gpt_oss"]).config


@pytest.mark.parametrize(("changes", "key", "rule"), GPT_OSS, ids=[str(row[0]) for row in GPT_OSS])
def test_bad_sizes_of_gpt_oss(gpt_oss: Config, changes: dict[str, object], key: str, rule: str) -> None:
    """CFG-2: one problem each; a window longer than the sample is none."""
    assert validate(changed(gpt_oss, {"model.sliding_window": 4096})) == []
    assert [(key, rule)] == [(problem.key, problem.rule) for problem in validate(changed(gpt_oss, changes))]


@pytest.fixture(scope="module")
def dense() -> Config:
    """The tiny dense model as a command composes it, with the default balance."""
    return compose(["model=dense"]).config


@pytest.fixture(scope="module")
def qwen() -> Config:
    """The tiny Qwen3-MoE as a command composes it."""
    return compose(["model=qwen3_moe"]).config


def changed(base: Config, changes: dict[str, object]) -> Config:
    """A copy of the config with these keys."""
    config = copy.deepcopy(base)
    for key, value in changes.items():
        node: object = config
        *parents, name = key.split(".")
        for parent in parents:
            node = getattr(node, parent)
        assert hasattr(node, name), key
        setattr(node, name, value)
    return config


def test_the_default_is_valid(base: Config) -> None:
    """CFG-2: nothing is wrong with what a newcomer types."""
    assert validate(base) == []


@pytest.mark.parametrize(("changes", "key", "rule"), BAD, ids=[str(row[0]) for row in BAD])
def test_bad_configs(base: Config, changes: dict[str, object], key: str, rule: str) -> None:
    """CFG-2: key and rule of each."""
    assert (key, rule) in [(problem.key, problem.rule) for problem in validate(changed(base, changes))]


@pytest.mark.parametrize(("changes", "key", "rule"), QWEN, ids=[str(row[0]) for row in QWEN])
def test_bad_sizes_of_qwen3_moe(qwen: Config, changes: dict[str, object], key: str, rule: str) -> None:
    """CFG-2: one problem each, and none for what is right."""
    assert validate(qwen) == []
    assert [(key, rule)] == [(problem.key, problem.rule) for problem in validate(changed(qwen, changes))]


@pytest.mark.parametrize(("changes", "key", "rule"), DENSE, ids=[str(row[0]) for row in DENSE])
def test_bad_sizes_of_dense(dense: Config, changes: dict[str, object], key: str, rule: str) -> None:
    """CFG-2: one problem each; a balance without experts to keep in use is none."""
    assert (dense.balance.kind, validate(dense)) == ("sequence", [])
    assert [(key, rule)] == [(problem.key, problem.rule) for problem in validate(changed(dense, changes))]


def test_edges_of_qwen3_moe_pass(qwen: Config) -> None:
    """ROUTE-3: a step beyond the layers leaves a dense model; one key head may serve all queries."""
    edges: dict[str, object] = {"model.mlp_only_layers": [0, 7], "model.num_kv_heads": 1, "model.top_k": 16}
    assert validate(changed(qwen, edges)) == []
    assert validate(changed(qwen, {"model.decoder_sparse_step": 9, "model.num_kv_heads": 6})) == []


@pytest.mark.parametrize("name", ["master", "split"])
def test_a_first_moment_in_bf16_goes_with_masters(base: Config, name: str) -> None:
    assert validate(changed(base, {"precision.first_moment": "bf16", "precision.name": name})) == []


def test_all_problems_at_once(base: Config) -> None:
    """CFG-2: pp3ep5 and a bad batch, schedule and name in one list, each once."""
    config = changed(
        base, {"mesh.pp": 9, "mesh.ep": 5, "max_steps": 0, "run_name": "a b", "optimizer.eps": 0.0}
    )
    found = [problem.key for problem in validate(config)]
    assert len(found) == len(set(found))
    assert {"mesh.ep", "global_batch_size", "max_steps", "run_name", "optimizer.eps"} < set(found)
    assert [problem.rule for problem in validate(config)].count("stages") == 1


def test_edges_pass(base: Config) -> None:
    """CFG-3: zeros and nulls that mean something are no mistakes, nor is a run shorter than its warm-up."""
    zeros: dict[str, object] = {"optimizer.weight_decay": 0.0, "balance.coef": 0.0, "lr_schedule.warmup": 0}
    nulls: dict[str, object] = {
        "optimizer.max_norm": None,
        "evaluation.samples": None,
        "lr_schedule.horizon": None,
    }
    more: dict[str, object] = {
        "max_steps": 1,
        "checkpoint.every": 0,
        "profile.steps": [1, 1],
        "resume": "a/b",
    }
    assert validate(changed(base, zeros | nulls | more)) == []


def test_the_same_table_without_asserts(base: Config, tmp_path: Path) -> None:
    """CFG-2: under `python -O` every bad config of the table is refused too."""
    (tmp_path / "config.yaml").write_text(dump_config(base))
    code = (
        "import sys; from pathlib import Path; from src.compose import load_config;"
        "from src.validate import validate;"
        "from tests.config.test_validate import BAD, changed;"
        "base = load_config(Path(sys.argv[1]));"
        "found = [[(p.key, p.rule) for p in validate(changed(base, c))] for c, k, r in BAD];"
        "missed = [row for row, said in zip(BAD, found) if row[1:] not in said];"
        "sys.exit(f'{__debug__} {missed}')"
    )
    command = [sys.executable, "-O", "-c", code, str(tmp_path / "config.yaml")]
    answer = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    assert answer.stderr.strip() == "False []"
