"""What forbids loading, all of it in one error and before anything is changed (CKPT-9, RUN-9)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from src.config import Config
from src.errors import UserError
from src.trainer.checkpoint import load as load_module
from src.trainer.checkpoint.find import find
from src.trainer.checkpoint.load import load
from tests.checkpoint.fake import STACK, Fake, alone, config
from tests.checkpoint.test_save import save_step

NORM, GATE, UP = "model.norm.weight", "model.layers.1.mlp.gate.weight", f"{STACK}.4.up_proj.weight"


def _edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what meta.json says of a checkpoint."""
    meta = json.loads((path / "meta.json").read_text())
    change(meta)
    (path / "meta.json").write_text(json.dumps(meta))


def _load(
    run: Path, settings: Config | None = None, data_key: str | None = "key", fake: Fake | None = None
) -> Fake:
    settings, fake = settings or config(), fake or Fake()
    found = find(settings, run, alone(), fake)
    assert found is not None
    load(found, settings, fake, fake.moments(), alone(), data_key)
    return fake


def _refusal(run: Path, settings: Config | None = None, data_key: str | None = "key") -> str:
    fake = Fake()
    with pytest.raises(UserError) as error:
        _load(run, settings, data_key, fake)
    assert error.value.code == 8
    assert not any(tensor.any() for tensor in fake.parameters.values()), "refused, yet something was loaded"
    return str(error.value)


def _rename(meta: dict[str, Any]) -> None:
    meta["tensors"]["model.final_norm.weight"] = meta["tensors"].pop(NORM)


CASES: dict[str, tuple[Callable[[dict[str, Any]], Any], list[str]]] = {
    "rename": (
        _rename,
        [
            f"{NORM}: in the model, not in the checkpoint",
            "model.final_norm.weight: in the checkpoint, not in the",
        ],
    ),
    "drop": (lambda m: m["tensors"].pop(UP), [f"{UP}: in the model, not in the checkpoint"]),
    "add": (
        lambda m: m["tensors"].update({"lm_head.bias": {"shape": [3], "dtype": "float32"}}),
        ["lm_head.bias: in the checkpoint, not in the model"],
    ),
    "reshape": (
        lambda m: m["tensors"][GATE].update(shape=[5, 6]),
        [f"{GATE}: shape (5, 6) in the checkpoint, (6, 5) in the model"],
    ),
    "recast": (
        lambda m: m["tensors"][NORM + "::exp_avg_sq"].update(dtype="bfloat16"),
        [f"{NORM}::exp_avg_sq: dtype bfloat16 in the checkpoint, float32 in the model"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_difference_is_refused_ckpt_9(tmp_path: Path, case: str) -> None:
    """CKPT-9: rename, drop, add, reshape, recast one entry: five messages, no load."""
    change, texts = CASES[case]
    _edit(save_step(tmp_path, 200), change)
    message = _refusal(tmp_path)
    for text in texts:
        assert text in message
    assert message.count("[CKPT-9]") == len(texts)


def test_all_differences_come_at_once_ckpt_9(tmp_path: Path) -> None:
    """CKPT-9: names, shapes, dtypes, model, optimizer kind and data key in one error."""
    path = save_step(tmp_path, 200)
    for case in ("drop", "add", "reshape", "recast"):
        _edit(path, CASES[case][0])
    _edit(path, lambda m: m["config"].update({"model.num_experts": 12, "optimizer.kind": "sgd"}))
    message = _refusal(tmp_path, data_key="other")
    for case in ("drop", "add", "reshape", "recast"):
        assert CASES[case][1][0] in message
    assert "model.num_experts: 12 in the checkpoint, 6 in this run" in message
    assert "optimizer.kind: 'sgd' in the checkpoint, 'adamw' in this run" in message
    assert "data: key key in the checkpoint, other in this run" in message


def test_without_the_comparison_dcp_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation of the tests above: DCP itself ignores an extra name and casts a dtype."""
    path = save_step(tmp_path, 200)
    for case in ("add", "recast"):
        _edit(path, CASES[case][0])
    monkeypatch.setattr(load_module, "tensor_problems", lambda *arguments: [])
    _load(tmp_path)


def test_thousands_of_names_are_one_line(tmp_path: Path) -> None:
    """Names that differ in numbers only are one problem, which counts them."""
    _edit(
        save_step(tmp_path, 200),
        lambda m: [
            m["tensors"].pop(n)
            for n in list(m["tensors"])
            if "experts.5." not in n and ".down_proj" in n and STACK in n
        ],
    )
    message = _refusal(tmp_path)
    first = ", ".join(f"{STACK}.{expert}.down_proj.weight" for expert in range(3))
    assert f"{first} and 2 more like them: in the model" in message
    assert message.count("[CKPT-9]") == 3


def test_data_key_gives_way_to_allow_change_prep_6(tmp_path: Path) -> None:
    """PREP-6: other data is refused unless `data.allow_change=true`."""
    save_step(tmp_path, 200)
    _refusal(tmp_path, data_key="other")
    _refusal(tmp_path, data_key=None)
    _load(tmp_path, config(data__allow_change=True), data_key="other")


def test_run_9_what_may_differ(tmp_path: Path) -> None:
    """RUN-9: mesh, micro-batches, steps and the optimizer's numbers may differ; seed and lengths may not."""
    save_step(tmp_path, 200)
    _load(
        tmp_path, config(mesh__ep=2, micro_batch_size=1, max_steps=7, optimizer__lr=0.5, checkpoint__every=3)
    )
    message = _refusal(tmp_path, config(seed=1, sequence_length=64))
    assert "seed: 0 in the checkpoint, 1 in this run" in message
    assert "sequence_length: 256 in the checkpoint, 64 in this run" in message


def test_a_moment_of_one_side_alone_is_an_option_of_the_optimizer(tmp_path: Path) -> None:
    """RUN-9: `optimizer.momentum` may change; the moment that comes with it starts at zero."""
    save_step(tmp_path, 200)
    fake, settings = Fake(), config(optimizer__momentum=0.9)
    found = find(settings, tmp_path, alone(), fake)
    assert found is not None
    buffer = {"momentum_buffer": fake.moments()["exp_avg"]}
    load(found, settings, fake, buffer, alone(), "key")
    assert fake.parameters[NORM].all()
    assert not any(tensor.any() for tensor in buffer["momentum_buffer"].values())
