"""What is kept (CKPT-7)."""

from __future__ import annotations

from pathlib import Path

import pytest

from src.errors import UserError
from src.trainer.checkpoint.retention import retain
from tests.checkpoint.fake import config
from tests.checkpoint.test_save import load_newest, save_step


def _kept(run: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in (run / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [
        (2, 0, [400, 500]),
        (1, 0, [500]),
        (0, 0, [500]),
        (9, 0, [100, 200, 300, 400, 500]),
        (1, 200, [200, 400, 500]),
    ],
)
def test_keep_last_and_every_ckpt_7(tmp_path: Path, keep_last: int, keep_every: int, kept: list[int]) -> None:
    """CKPT-7: the newest ones, and multiples of `keep_every`; never none."""
    for step in (100, 200, 300, 400, 500):
        save_step(tmp_path, step)
    settings = config(checkpoint__keep_last=keep_last, checkpoint__keep_every=keep_every)
    retain(settings, tmp_path, protect=500)
    assert _kept(tmp_path) == kept
    assert load_newest(tmp_path) == 500


def test_marked_and_damaged_ones_stay_ckpt_7(tmp_path: Path) -> None:
    """CKPT-7: one marked `keep` stays; a damaged one is neither deleted nor counted."""
    paths = {step: save_step(tmp_path, step) for step in (100, 200, 300, 400)}
    (paths[100] / "keep").touch()
    (paths[400] / "meta.json").unlink()
    retain(config(checkpoint__keep_last=1), tmp_path, protect=300)
    assert _kept(tmp_path) == [100, 300, 400]


def test_the_one_just_published_stays(tmp_path: Path) -> None:
    """After a resume from further back, newer numbers of the branch left behind do not push it out."""
    for step in (100, 200, 300):
        save_step(tmp_path, step)
    retain(config(checkpoint__keep_last=1), tmp_path, protect=100)
    assert _kept(tmp_path) == [100, 300]


def test_a_failed_second_save_leaves_the_first_ckpt_7(tmp_path: Path) -> None:
    """CKPT-7: keep_last=1 and a second save that fails: the first survives and is used."""
    save_step(tmp_path, 100)
    retain(config(checkpoint__keep_last=1), tmp_path, protect=100)

    def fail(point: str) -> None:
        if point == "whole":
            raise OSError("gone")

    with pytest.raises(UserError, match="gone"):
        save_step(tmp_path, 200, fail)
    assert load_newest(tmp_path) == 100
