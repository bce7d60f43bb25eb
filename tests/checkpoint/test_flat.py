"""One file of full tensors, and starting from weights (CKPT-13)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.checkpoints import main
from src.errors import UserError
from src.trainer.checkpoint import flat as flat_module
from src.trainer.checkpoint.weights import load_weights
from tests.checkpoint.fake import MOMENTS, STACK, Fake, alone, canonical, config, value, wrong
from tests.checkpoint.test_save import save_step


def _init_from(path: Path) -> tuple[Fake, list[str]]:
    fake = Fake()
    return fake, load_weights(config(init_from=str(path)), fake, alone())


def test_flat_ckpt_13(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CKPT-13: full tensors under canonical names, moments beside them, read back by safetensors itself."""
    path, out = save_step(tmp_path, 1), tmp_path / "out.safetensors"
    monkeypatch.setattr(flat_module, "BATCH", 100)
    assert main(["flat", str(path), str(out)]) == 0
    assert f"{3 * len(canonical()) + 1} tensors of step 1" in capsys.readouterr().out
    tensors = load_file(out)
    names = {n + s: shape for n, shape in canonical().items() for s in ("", *(f"::{m}" for m in MOMENTS))}
    assert set(tensors) == {*names, "extra.balance.load.1"}
    for name, shape in names.items():
        assert torch.equal(tensors[name], value(name, shape)), name
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == [out.name]


def test_flat_refuses_a_damaged_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 8, the damage named, no file written; `verify` and `list` tell the same."""
    path, out = save_step(tmp_path, 1), tmp_path / "out.safetensors"
    assert main(["verify", str(path)]) == 0
    shard = path / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert main(["flat", str(path), str(out)]) == 8
    assert main(["verify", str(path)]) == 8
    assert "has another sha256" in capsys.readouterr().err
    assert not out.exists()
    shard.unlink()
    assert main(["list", str(tmp_path)]) == 0
    assert "not complete: __0_0.distcp is missing" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["checkpoint", "flat"])
def test_init_from_is_bitwise_ckpt_13(tmp_path: Path, kind: str) -> None:
    """CKPT-13: weights from a checkpoint or its flat file are bitwise those saved, and no moment is read."""
    path = save_step(tmp_path, 1)
    if kind == "flat":
        main(["flat", str(path), str(tmp_path / "out.safetensors")])
        path = tmp_path / "out.safetensors"
    fake, initial = _init_from(path)
    assert initial == []
    assert wrong(fake, {}) == ["extra.balance.load.1"]


def test_init_from_lists_what_stays_and_casts(tmp_path: Path) -> None:
    """CKPT-13: names that the file lacks keep their values and are returned; other dtypes are cast."""
    path = tmp_path / "part.safetensors"
    norm = torch.arange(5).to(torch.bfloat16)
    save_file({"model.norm.weight": norm}, path)
    fake, initial = _init_from(path)
    assert initial == sorted(set(canonical()) - {"model.norm.weight"})
    assert torch.equal(fake.parameters["model.norm.weight"], norm.float())


def test_init_from_refuses_what_does_not_fit_ckpt_9(tmp_path: Path) -> None:
    """Other shapes and names the model has not come in one error, and nothing is read."""
    path, up = tmp_path / "other.safetensors", f"{STACK}.2.up_proj.weight"
    save_file(
        {up: torch.ones(5, 9), "model.norm.weight": torch.ones(5), "extra_head.weight": torch.ones(2)}, path
    )
    with pytest.raises(UserError) as error:
        _init_from(path)
    assert error.value.code == 8
    assert f"{up}: shape (5, 9) in the checkpoint, (9, 5) in the model" in str(error.value)
    assert "extra_head.weight: in the checkpoint, not in the model" in str(error.value)


@pytest.mark.parametrize("name", ["missing.safetensors", "noise.safetensors", "empty.safetensors", "folder"])
def test_init_from_refuses_what_it_cannot_read(tmp_path: Path, name: str) -> None:
    """A missing file, noise, a file without weights and a directory that is no checkpoint: exit 8."""
    (tmp_path / "noise.safetensors").write_bytes(b"\x07" * 64)
    save_file({"model.norm.weight::exp_avg": torch.ones(5)}, tmp_path / "empty.safetensors")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=name) as error:
        _init_from(tmp_path / name)
    assert error.value.code == 8
