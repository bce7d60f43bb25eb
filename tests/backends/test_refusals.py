"""What the transformers backend cannot do is refused at composition, with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from src.compose import compose
from src.config import (
    BackendConfig,
    BalanceConfig,
    Config,
    DataConfig,
    KernelsConfig,
    MeshConfig,
    PrecisionConfig,
    TokenizerConfig,
)
from src.errors import UserError
from src.models.convert.table import CONVERSIONS
from src.validate import validate
from tests.models.odd import deepseek_v2, dense, qwen3_moe

PEER = BackendConfig("transformers")
MODEL = deepseek_v2(num_layers=4, num_experts=20, context=4096)
BAD: list[tuple[dict[str, object], str, str]] = [
    # changes, key, part of the message
    ({"mesh": MeshConfig("pp2", pp=2)}, "mesh.pp", "layers are not cut into stages"),
    ({"mesh": MeshConfig("ep2", ep=2)}, "mesh.ep", "experts are not divided"),
    ({"mesh": MeshConfig("cp2", cp=2)}, "mesh.cp", "wants the whole sequence"),
    ({"precision": PrecisionConfig("fp64")}, "precision", "in fp32 whatever the model's dtype"),
    (
        {"balance": BalanceConfig(force="even"), "model": dense(context=4096)},
        "balance.force",
        "has no experts",
    ),
    ({"kernels": KernelsConfig(attention="eager")}, "kernels.attention", "by its own code"),
    ({"kernels": KernelsConfig(grouped_mm="eager")}, "kernels.grouped_mm", "by its own code"),
    ({"model": replace(MODEL, num_shared_experts=0)}, "model.num_shared_experts", "always builds"),
    ({"model": replace(MODEL, kv_lora_rank=13)}, "model.kv_lora_rank", "even widths"),
    ({"model": replace(MODEL, hidden_size=46)}, "model.hidden_size", "multiple of"),
    (
        {"backend": BackendConfig("native", attn_implementation="sdpa")},
        "backend.attn_implementation",
        "chooses by kernels",
    ),
    (
        {"backend": BackendConfig("native", experts_implementation="eager")},
        "backend.experts_implementation",
        "chooses by kernels",
    ),
]


DATA: dict[str, object] = {
    "data": DataConfig(kind="synthetic", ids=97),
    "tokenizer": TokenizerConfig(kind="none"),
}


def peer_config(**changes: object) -> Config:
    options: dict[str, object] = {"model": MODEL, "backend": PEER, "global_batch_size": 16} | DATA
    return Config(**(options | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("changes", "key", "part"), BAD, ids=[row[1] for row in BAD])
def test_refusals_name_the_reason(changes: dict[str, object], key: str, part: str) -> None:
    """CFG-2, TRAP-6: key and reason."""
    found = {problem.key: problem.message for problem in validate(peer_config(**changes))}
    assert part in found[key]


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig("rep2dp2", rep=2, dp=2)])
@pytest.mark.parametrize("balance", ["sequence", "micro_batch", "global_batch_lagged", "none"])
def test_what_it_can_do_passes(mesh: MeshConfig, balance: str) -> None:
    assert validate(peer_config(mesh=mesh, balance=BalanceConfig(kind=balance))) == []


def test_qwen3_moe_passes_at_odd_sizes() -> None:
    """MOD-3: transformers takes every size that we do."""
    assert validate(peer_config(model=qwen3_moe(context=4096), mesh=MeshConfig("rep2dp2", rep=2, dp=2))) == []


def test_a_family_without_conversion_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of families is that of the table."""
    monkeypatch.delitem(CONVERSIONS, "deepseek_v2")
    found = [problem.message for problem in validate(peer_config())]
    assert found == ["the family deepseek_v2 has no conversion to transformers"]


def test_the_group_composes() -> None:
    """`backend=transformers` is an option like any other, and a bad pair ends in one message."""
    assert compose(["backend=transformers", "mesh=rep2dp2"]).config.backend == PEER
    with pytest.raises(UserError) as caught:
        compose(["backend=transformers", "mesh=pp2ep2"])
    assert [problem.key for problem in caught.value.problems] == ["mesh.pp", "mesh.ep"]
