"""Which checkpoint a run goes on from, and what makes one unusable (CKPT-5)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from src.errors import UserError
from src.trainer.checkpoint import find as find_module
from src.trainer.checkpoint.directory import Found, newest, read_meta, size_in_bytes
from src.trainer.checkpoint.find import find
from tests.checkpoint.fake import Fake, alone, config
from tests.checkpoint.test_save import load_newest, save_step


def _find(run: Path, **changes: object) -> Found | None:
    return find(config(**changes), run, alone(), Fake())


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "shard missing": ("__0_0.distcp is missing", lambda p: (p / "__0_0.distcp").unlink()),
    "shard truncated": ("bytes, not", lambda p: (p / "__0_0.distcp").write_bytes(b"PK")),
    "shard empty": ("has 0 bytes", lambda p: (p / "__0_0.distcp").write_bytes(b"")),
    "shard flipped": ("__0_0.distcp has another sha256", lambda p: _flip(p / "__0_0.distcp")),
    "index missing": (".metadata is missing", lambda p: (p / ".metadata").unlink()),
    "index flipped": (".metadata has another sha256", lambda p: _flip(p / ".metadata")),
    "meta missing": ("meta.json cannot be read", lambda p: (p / "meta.json").unlink()),
    "meta empty": ("meta.json is damaged", lambda p: (p / "meta.json").write_bytes(b"")),
    "meta no text": ("meta.json is damaged", lambda p: (p / "meta.json").write_bytes(b"\xff\xfe")),
    "meta other": ("meta.json is damaged", lambda p: (p / "meta.json").write_text('{"format": 1}')),
    "meta list": ("meta.json is damaged", lambda p: (p / "meta.json").write_text("[]")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_step_is_passed_over_ckpt_5(tmp_path: Path, damage: str) -> None:
    """CKPT-5: a damaged step is named, the one before is taken, nothing is deleted."""
    save_step(tmp_path, 200)
    path = save_step(tmp_path, 300)
    text, harm = DAMAGE[damage]
    harm(path)
    before = sorted(p.name for p in path.iterdir())
    found = _find(tmp_path)
    assert found is not None
    assert found.step == 200
    (note,) = found.skipped
    assert note.startswith("step-00000300 is not complete: ")
    assert text in note
    assert sorted(p.name for p in path.iterdir()) == before
    assert load_newest(tmp_path) == 200


def test_without_hashes_a_flipped_byte_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation of the test above: it is the hash that notices."""
    DAMAGE["shard flipped"][1](save_step(tmp_path, 300))
    monkeypatch.setattr(find_module, "verify_files", lambda path, meta, names: [])
    found = _find(tmp_path)
    assert found is not None
    assert found.step == 300


def test_above_the_limit_sizes_are_compared_only(tmp_path: Path) -> None:
    """CKPT-5: `checkpoint.verify` bounds what is hashed, not what is looked at."""
    path = save_step(tmp_path, 300)
    size = read_meta(path)[0].size
    _flip(path / "__0_0.distcp")
    with pytest.raises(UserError, match="another sha256"):
        _find(tmp_path, checkpoint__verify=f"{size}B")
    assert _find(tmp_path, checkpoint__verify=str(size - 1)) is not None
    (path / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(UserError, match="has 0 bytes"):
        _find(tmp_path, checkpoint__verify="0")


def test_no_checkpoint_is_none_and_no_usable_one_is_refused(tmp_path: Path) -> None:
    """A run without checkpoints begins; one that has none but damaged ones does not begin again unasked."""
    assert _find(tmp_path) is None
    assert newest(tmp_path) is None
    (save_step(tmp_path, 200) / "meta.json").unlink()
    with pytest.raises(UserError, match=r"no usable checkpoint in .*step-00000200 is not complete") as error:
        _find(tmp_path)
    assert error.value.code == 8
    assert newest(tmp_path) is None


def test_hidden_and_foreign_names_are_no_steps(tmp_path: Path) -> None:
    """Only `step-` and digits count, and by number: step 10^8 is newer than step 99999999."""
    save_step(tmp_path, 99_999_999)
    newer = save_step(tmp_path, 100_000_000)
    for name in (".tmp-step-00000900-1", ".old-step-00000900-1", "step-00000900.bak", "step-last", "notes"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert newest(tmp_path) == newer


def test_resume_modes_ckpt_5(tmp_path: Path) -> None:
    """CKPT-5: `none` is refused where checkpoints are, a path is taken or refused, `allow_code` is `auto`."""
    assert _find(tmp_path, resume="none") is None
    old, new = save_step(tmp_path, 200), save_step(tmp_path, 300)
    with pytest.raises(UserError, match="the newest is step-00000300") as error:
        _find(tmp_path, resume="none")
    assert error.value.code == 8
    for resume, path in (("auto", new), ("allow_code", new), (str(old), old)):
        found = _find(tmp_path, resume=resume)
        assert found is not None
        assert found.path == path
    with pytest.raises(UserError, match="no usable checkpoint") as error:
        _find(tmp_path, resume=str(tmp_path / "checkpoints"))
    assert error.value.code == 8


def test_other_format_is_refused_not_passed_over_ckpt_9(tmp_path: Path) -> None:
    """CKPT-9: a checkpoint of a later version is no damaged one; both formats are named."""
    save_step(tmp_path, 200)
    meta = save_step(tmp_path, 300) / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "format": 2}))
    with pytest.raises(UserError, match=r"written in format 2, this version reads 1") as error:
        _find(tmp_path)
    assert error.value.code == 8
    assert newest(tmp_path) == meta.parent


@pytest.mark.parametrize(
    ("text", "size"), [("64GiB", 64 * 2**30), ("0", 0), ("7 B", None), ("3KiB", 3072), ("1.5GiB", None)]
)
def test_sizes(text: str, size: int | None) -> None:
    """`checkpoint.verify` is a whole number with a unit, or is refused with an example."""
    if size is None:
        with pytest.raises(UserError, match=r"checkpoint\.verify=64GiB"):
            size_in_bytes(text)
    else:
        assert size_in_bytes(text) == size
