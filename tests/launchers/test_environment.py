"""The table of environment variables (ENV, CACHE, LOCAL-3)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from src.code_identity import CHECKOUT
from src.config import Config, DeterminismConfig, MeshConfig, PathsConfig
from src.errors import UserError
from src.launchers.caches import cache_root
from src.launchers.environment import (
    INHERITED,
    TABLE,
    Environment,
    Setting,
    rank_environment,
    unknown_names,
)
from src.launchers.environment_omitted import OMITTED
from src.trainer.runtime import check_shared


def values(
    config: Config, platform: str = "cpu", shell: dict[str, str] | None = None, **numbers: int
) -> dict[str, str]:
    setting = Setting(config, platform, **{"ranks": config.mesh.world, "cores": 8, **numbers})
    return rank_environment(setting, shell or {}).values


@pytest.mark.parametrize(
    ("ranks", "jobs", "cores", "threads", "policy"),
    [
        (1, 1, 8, "8", None),
        (3, 1, 8, "2", None),
        (4, 1, 8, "2", "PASSIVE"),
        (4, 1, 2, "1", "PASSIVE"),
        (1, 2, 2, "1", "PASSIVE"),
    ],
)
def test_threads(ranks: int, jobs: int, cores: int, threads: str, policy: str | None) -> None:
    """OMP_NUM_THREADS is cores / ranks over all jobs; waiting is passive where they fill the cores."""
    found = values(Config(), ranks=ranks, jobs=jobs, cores=cores)
    assert (found["OMP_NUM_THREADS"], found.get("OMP_WAIT_POLICY")) == (threads, policy)


@pytest.mark.parametrize(
    ("mesh", "number"), [(MeshConfig(pp=2), "1"), (MeshConfig(ep=2), "8"), (MeshConfig(dp=3), "8")]
)
def test_connections(mesh: MeshConfig, number: str) -> None:
    """One hardware queue, eight where data or experts are divided; on GPUs only."""
    assert values(Config(mesh=mesh), "cuda")["CUDA_DEVICE_MAX_CONNECTIONS"] == number
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in values(Config(mesh=mesh), "cpu")


def test_precedence_and_origins() -> None:
    """ENV-1, ENV-3: shell over env.NAME over determinism over platform; origins kept, secrets masked."""
    config = Config(env={"TORCH_NCCL_HIGH_PRIORITY": "0", "OMP_NUM_THREADS": "5", "MY_TOKEN": "s3cret"})
    shell = {"OMP_NUM_THREADS": "3", "UNRELATED": "x"}
    found = rank_environment(Setting(config, "cuda", ranks=1, cores=8), shell)
    assert found.values["OMP_NUM_THREADS"] == "3"
    assert found.values["TORCH_NCCL_HIGH_PRIORITY"] == "0"
    assert found.values["MY_TOKEN"] == "s3cret"
    assert "UNRELATED" not in found.values
    assert found.json()["MY_TOKEN"] == {"value": "***", "origin": "env"}
    assert found.json()["OMP_NUM_THREADS"] == {"value": "3", "origin": "shell"}
    assert found.json()["PYTORCH_ALLOC_CONF"]["origin"] == "platform"


@pytest.mark.parametrize("where", ["shell", "env"])
def test_bitwise_is_not_undone(where: str) -> None:
    """ENV-1: determinism=bitwise refuses a contradicting value; the same value passes."""
    for value, refused in (("random", True), ("0", False)):
        config = Config(
            determinism=DeterminismConfig("bitwise"), env={"PYTHONHASHSEED": value} if where == "env" else {}
        )
        shell = {"PYTHONHASHSEED": value} if where == "shell" else {}
        if refused:
            with pytest.raises(UserError, match=r"PYTHONHASHSEED=random.*needs 0"):
                values(config, shell=shell)
        else:
            assert values(config, shell=shell)["PYTHONHASHSEED"] == "0"


def test_checkout_comes_first_on_the_path() -> None:
    """PYTHONPATH keeps the user's entries behind this checkout."""
    assert (
        values(Config(), shell={"PYTHONPATH": "/elsewhere"})["PYTHONPATH"]
        == f"{CHECKOUT}{os.pathsep}/elsewhere"
    )


def test_table() -> None:
    """ENV-4: one row per name and platform, each with a reason; visible devices are never set (ENV-2)."""
    pairs = [(row.name, platform) for row in TABLE for platform in row.platforms]
    assert len(pairs) == len(set(pairs))
    assert all(row.reason and row.rule.words for row in TABLE)
    assert not any("VISIBLE_DEVICES" in row.name for row in TABLE)
    assert {row.where for row in TABLE} == {"launch", "node", "rank"}
    assert {row.kind for row in TABLE} == {"int", "bool", "text", "path", "secret"}
    assert {"RANK", "LOCAL_RANK", "MASTER_ADDR", "NODE_RANK"} <= set(INHERITED)


def test_what_is_left_out_is_not_in_the_table() -> None:
    """ENV: the list of what another launcher sets has a reason for each, and nothing that the table sets."""
    names = [name for names, _ in OMITTED for name in names]
    assert len(names) == len(set(names))
    assert not {row.name for row in TABLE} & set(names)
    assert all(reason.endswith(".") for _, reason in OMITTED)


def test_paths_and_secrets_by_name() -> None:
    """CFG-16, LOG-5: what the user has is passed on; a secret's value stands in nothing that is written."""
    shell = {"HF_HOME": "/hub", "HF_TOKEN": "hf_x", "MLFLOW_TRACKING_URI": "http://u:p@h", "MLFLOWER": "x"}
    found = rank_environment(Setting(Config(), "cpu", ranks=1), shell)
    assert found.values.items() >= {k: v for k, v in shell.items() if k != "MLFLOWER"}.items()
    assert "MLFLOWER" not in found.values
    assert found.public()["HF_HOME"] == "/hub"
    shown = f"{found.json()} {found.public()} {found.of_ranks(1)['MANYHEAD_SHARED']}"
    assert not any(secret in shown for secret in ("hf_x", "u:p@h"))
    assert found.json()["HF_TOKEN"] == {"value": "***", "origin": "shell"}
    assert "WANDB_API_KEY" not in found.values


def test_applied_before_torch_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """ENV-3: an environment that comes after `import torch` is an error."""
    for name in ("PYTHONUNBUFFERED", "MANYHEAD_ATTEMPT", "MANYHEAD_SHARED"):
        monkeypatch.setenv(name, "")
    found = Environment({"PYTHONUNBUFFERED": "1"}, {"PYTHONUNBUFFERED": "platform"})
    with pytest.raises(RuntimeError, match="before torch"):
        found.apply(2, {"torch": object()})
    assert os.environ["PYTHONUNBUFFERED"] == ""
    found.apply(2, {})
    assert (os.environ["PYTHONUNBUFFERED"], os.environ["MANYHEAD_ATTEMPT"]) == ("1", "2")


def test_nodes_share_what_is_not_of_a_node() -> None:
    """ENV-4: ranks compare the rows of the launching process with rank 0's, and no others."""
    bitwise = Config(determinism=DeterminismConfig("bitwise"), env={"MINE": "1"})

    def shared(shell: dict[str, str], cores: int) -> dict[str, str]:
        found = rank_environment(Setting(bitwise, "cuda", ranks=1, cores=cores), shell)
        return json.loads(found.of_ranks(1)["MANYHEAD_SHARED"])

    here, there = shared({}, 4), shared({"TORCH_NCCL_HIGH_PRIORITY": "0", "TRITON_CACHE_DIR": "/x"}, 9)
    assert {"NCCL_ALGO", "PYTHONHASHSEED", "CUDA_DEVICE_MAX_CONNECTIONS"} <= set(here)
    assert not {"OMP_NUM_THREADS", "TRITON_CACHE_DIR", "PYTHONPATH", "MINE"} & set(here)
    check_shared(3, here, dict(here))
    with pytest.raises(UserError, match=r"rank 3: TORCH_NCCL_HIGH_PRIORITY is 0, on rank 0 1:") as refused:
        check_shared(3, there, here)
    assert refused.value.code == 6
    with pytest.raises(UserError, match="NCCL_ALGO is None, on rank 0 Ring"):
        check_shared(1, {k: v for k, v in here.items() if k != "NCCL_ALGO"}, here)


def test_unknown_names() -> None:
    """ENV-5: a misspelt variable of ours is named with the nearest one."""
    assert unknown_names({"MANYHEAD_SPLIT_SED": "1", "MANYHEAD_SPLIT_SEED": "1", "HOME": "/"}) == [
        "warning: the environment variable MANYHEAD_SPLIT_SED is unknown; did you mean MANYHEAD_SPLIT_SEED?"
    ]


def test_cache(tmp_path: Path) -> None:
    """CACHE-1, CACHE-2: `paths.cache` as given, by versions below it; refused (3) if not writable."""
    root, warning = cache_root(Config(paths=PathsConfig(cache=str(tmp_path / "cache"))))
    assert (root.parent, warning) == (tmp_path / "cache", None)
    assert values(Config(), cores=1)["TORCHINDUCTOR_CACHE_DIR"].endswith("inductor")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="not writable") as refused:
        cache_root(Config(paths=PathsConfig(cache=str(tmp_path / "file"))))
    assert refused.value.code == 3
