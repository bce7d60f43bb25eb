"""DET-5, DET-6: one switch, asserted by each rank; and devices that ranks share in tests."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from src.config import (
    Config,
    DebugConfig,
    DeterminismConfig,
    KernelsConfig,
    LauncherConfig,
    MeshConfig,
    PlatformConfig,
)
from src.errors import UserError
from src.kernels.quirks import QUIRKS
from src.launchers.environment import Setting, rank_environment
from src.trainer import determinism
from src.trainer.repairs import autotune_of
from src.trainer.runtime import pick_device
from src.validate import validate
from tests.trainer.small import run_here, small_config

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The switch is one of the whole process."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cudnn.benchmark = False


def test_det_6_one_switch_sets_everything_and_each_rank_asserts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.backends.cudnn.benchmark = True
    bitwise = Config(determinism=DeterminismConfig("bitwise"))
    determinism.settle(Config())
    determinism.check(Config(), CUDA)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    with pytest.raises(AssertionError):
        determinism.check(bitwise, CUDA)
    determinism.settle(bitwise)
    determinism.check(bitwise, CUDA)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(AssertionError):
        determinism.check(bitwise, CUDA)
    determinism.check(bitwise, torch.device("cpu"))


@pytest.mark.parametrize("poison", [False, True])
def test_det_7_new_memory_is_nan_only_where_a_test_asks(poison: bool) -> None:
    determinism.settle(Config(determinism=DeterminismConfig("bitwise"), debug=DebugConfig(poison=poison)))
    assert torch.utils.deterministic.fill_uninitialized_memory == poison


def test_det_5_nothing_is_chosen_by_timing() -> None:
    """Triton's tuners are pinned, Inductor's switched off; caches lie below a directory of the user's own."""
    bitwise = Config(determinism=DeterminismConfig("bitwise"))
    assert [
        autotune_of(c) for c in (Config(), Config(kernels=KernelsConfig(autotune="pinned")), bitwise)
    ] == [
        "auto",
        "pinned",
        "pinned",
    ]
    found = rank_environment(Setting(bitwise, "cuda", ranks=1, cache=Path("/var/tmp/of_user")), {}).values
    assert found["TORCHINDUCTOR_DETERMINISTIC"] == "1"
    assert found["TORCHINDUCTOR_MAX_AUTOTUNE"] == "0"
    assert {found[f"{name}_CACHE_DIR"] for name in ("TRITON", "TORCHINDUCTOR")} == {
        "/var/tmp/of_user/triton",
        "/var/tmp/of_user/inductor",
    }
    with pytest.raises(UserError, match=r"TORCHINDUCTOR_MAX_AUTOTUNE=1.*needs 0"):
        rank_environment(Setting(bitwise, "cuda", ranks=1), {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"})
    free = rank_environment(Setting(Config(), "cuda", ranks=1), {}).values
    assert "TORCHINDUCTOR_MAX_AUTOTUNE" not in free


def test_reg_3_kernels_json_says_what_became_of_quirks_and_rules(tmp_path: Path) -> None:
    """PATCH-2, PATCH-3, KDA-11: part of the text whose digest ranks compare."""
    config = small_config(tmp_path, max_steps=1)
    run_here(config, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "kernels.json").read_text())
    assert set(record["quirks"]) == set(QUIRKS)
    assert record["quirks"]["fla_kda_stages"] == {"status": "not_applicable", "why": "not on ROCm"}
    assert record["quirks"]["grouped_mm_tail"]["status"] == "met"
    assert record["rules"] == []
    assert record["autotune"] == "auto"


def test_a_disabled_quirk_must_be_one(tmp_path: Path) -> None:
    wrong = small_config(tmp_path, kernels=KernelsConfig(quirks_disabled=["fla", "fla_kda_stages"]))
    (problem,) = validate(wrong)
    assert problem.key == "kernels.quirks_disabled"
    assert problem.message.startswith("fla: no such patch")


def test_ranks_share_a_device_only_where_a_test_asks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    sharing = Config(launcher=LauncherConfig(share_device=True), platform=PlatformConfig("cuda"))
    assert [pick_device(sharing, rank).index for rank in range(4)] == [0, 1, 0, 1]
    assert pick_device(Config(), 1).index == 1
    with pytest.raises(UserError, match="no GPU for local rank 2, 2 found") as refused:
        pick_device(Config(), 2)
    assert refused.value.code == 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="no GPU for local rank 0, 0 found"):
        pick_device(sharing, 0)
    pipelined = small_config(
        tmp_path, launcher=LauncherConfig(share_device=True), mesh=MeshConfig("pp2", pp=2)
    )
    assert [p.key for p in validate(pipelined) if p.rule == "share"] == ["launcher.share_device"]
