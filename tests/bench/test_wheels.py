"""Wheels that come in pieces to a machine without network."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from src.bench.wheels import main, wheels

NAME = "thing-1.0-py3-none-any.whl"


@pytest.fixture
def pieces(tmp_path: Path) -> list[tuple[str, bytes]]:
    """A wheel in four, named as `split` names them."""
    path = tmp_path / NAME
    with zipfile.ZipFile(path, "w") as archive:
        for index in range(5):
            archive.writestr(f"thing/{index}.py", f"x = {index}\n" * 40)
    data = path.read_bytes()
    size = len(data) // 4 + 1
    return [(f"{NAME}.part-a{letter}", data[i * size :][:size]) for i, letter in enumerate("abcd")]


def give(folder: Path, pieces: list[tuple[str, bytes]]) -> Path:
    """A folder that holds these pieces and nothing else."""
    folder.mkdir()
    for name, data in pieces:
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("missing", range(4))
def test_pieces_of_two_runs_make_a_wheel(
    missing: int, pieces: list[tuple[str, bytes]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever is missing, nothing is installed before it comes; then once, and again from what is kept."""
    kept = tmp_path / "kept"
    first = give(tmp_path / "first", [piece for i, piece in enumerate(pieces) if i != missing])
    assert main([str(first), str(kept)]) == 0
    said = capsys.readouterr()
    assert (said.out, "not whole with 3 pieces" in said.err) == ("", True)
    second = give(tmp_path / "second", [pieces[missing]])
    (second / "whole.whl").write_bytes(b"as it came")
    assert list(wheels(second, kept)) == [kept / NAME, second / "whole.whl"]
    assert (kept / NAME).read_bytes() == b"".join(data for _, data in pieces)
    assert sorted(path.name for path in kept.iterdir()) == [NAME]
    assert list(wheels(first, kept)) == [kept / NAME]
