"""Documents and their side (CORPUS-1, SPLIT-1 to SPLIT-3)."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from src.errors import UserError
from src.trainer.data.corpus import open_data
from src.trainer.data.documents import Tally, documents, is_held_out
from src.trainer.data.files import matching_files, stdlib_files
from tests.data.small import prepared, small_config, texts, write_corpus


def read(path: Path, **changes: Any) -> tuple[list[str], Tally]:
    """The texts of the files below `path`."""
    config, tally = small_config(path, path, **{f"data__{k}": v for k, v in changes.items()}), Tally()
    found = list(documents(config.data, tuple(matching_files([f"{path}/*"])), tally))
    assert all(d.size == len(d.text.encode()) for d in found)
    assert all(d.digest == hashlib.sha256(d.text.encode()).hexdigest() for d in found)
    return [d.text for d in found], tally


def test_files_in_name_order_without_the_empty(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"zwei\r\n")
    (tmp_path / "a.txt").write_bytes(b"eins\n")
    (tmp_path / "c.md").touch()
    assert read(tmp_path) == (["eins\n", "zwei\r\n"], Tally(empty=1))


def test_lines_of_every_kind(tmp_path: Path) -> None:
    lines = [
        json.dumps({"text": t, "id": i}, ensure_ascii=i % 2 == 0) for i, t in enumerate(["ä\n", "", "b"])
    ]
    (tmp_path / "1.jsonl").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    with gzip.open(tmp_path / "2.jsonl.gz", "wt", encoding="utf-8") as handle:
        handle.write(lines[2])
    (tmp_path / "3.txt").write_bytes(b" x y\t\r\n\nlast")
    assert read(tmp_path, unit="line") == (["ä\n", "b", "b", " x y\t", "last"], Tally(empty=2))
    (tmp_path / "4.csv").write_text("a,b")
    with pytest.raises(UserError, match=r"4\.csv.*\.jsonl"):
        read(tmp_path, unit="line")


BAD_LINES = {
    '{"body": 1, "alt": 2}': "alt, body",
    '{"text": 7}': "found text",
    "[1]": "list",
    '{"text": ': "not JSON",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_line_without_text_is_named(tmp_path: Path, line: str) -> None:
    """`text_key` absent in line 17: file, line, keys found."""
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n' * 16 + line)
    with pytest.raises(UserError, match=rf"x\.jsonl, line 17.*{BAD_LINES[line]}") as caught:
        read(tmp_path, unit="line")
    assert caught.value.code == 4


@pytest.mark.parametrize("unit", ["file", "line"])
def test_bad_text(tmp_path: Path, unit: str) -> None:
    (tmp_path / "a.txt").write_bytes(b"good")
    (tmp_path / "b.txt").write_bytes(b"b\xe4d")
    with pytest.raises(UserError, match=r"b\.txt.*not UTF-8 at byte 1.*data\.on_bad_text=skip"):
        read(tmp_path, unit=unit)
    assert read(tmp_path, unit=unit, on_bad_text="skip") == (["good"], Tally(skipped=1))
    assert read(tmp_path, unit=unit, on_bad_text="replace") == (["good", "b�d"], Tally(replaced=1))


def test_half_a_surrogate_is_bad_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x\\ud83d"}\n{"text": "\\ud83d\\ude00"}')
    with pytest.raises(UserError, match="line 1: a surrogate"):
        read(tmp_path, unit="line")
    assert read(tmp_path, unit="line", on_bad_text="replace") == (["x�", "😀"], Tally(replaced=1))


def test_a_file_that_changes_while_it_is_read_fails_the_build(tmp_path: Path) -> None:
    """CORPUS-1: no artifact is left under the key of what it was."""
    config = small_config(tmp_path)
    found = matching_files(config.data.files)
    stream = documents(config.data, tuple(found), Tally())
    next(stream)
    Path(found[1].path).write_text("another text of another length")
    with pytest.raises(UserError, match=r"0001\.txt changed while it was read") as caught:
        list(stream)
    assert caught.value.code == 4
    stream = documents(config.data, tuple(matching_files(config.data.files)), Tally())
    os.utime(tmp_path / "corpus" / "0000.txt", ns=(1, 1))
    with pytest.raises(UserError, match=r"0000\.txt changed"):
        list(stream)


@pytest.mark.parametrize(
    "content", [b"not gzip", gzip.compress(b'{"text": "x"}\n' * 99)[:-9], gzip.compress(b"x")[:12]]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes) -> None:
    """The bad-input table: another header or a truncated file ends in 4 with its name, not in a traceback."""
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.jsonl\.gz") as caught:
        read(tmp_path, unit="line")
    assert caught.value.code == 4


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    """CORPUS-1, also where `data.identity=stat` opened nothing before."""
    config = small_config(tmp_path)
    found = tuple(matching_files(config.data.files))
    (tmp_path / "corpus" / "0001.txt").unlink()
    with pytest.raises(UserError, match=r"0001\.txt.*No such file") as caught:
        list(documents(config.data, found, Tally()))
    assert caught.value.code == 4


def test_python_sources_by_declared_encoding(tmp_path: Path) -> None:
    config = small_config(tmp_path, tmp_path, data__kind="stdlib", data__on_bad_text="skip")
    latin = "# -*- coding: latin-1 -*-\nx = 'é'\r\n"
    (tmp_path / "a.py").write_bytes(latin.encode("latin-1"))
    (tmp_path / "b.py").write_bytes(b"\xef\xbb\xbfy = 1\n")
    (tmp_path / "c.py").write_bytes(b"# coding: klingon\n")
    (tmp_path / "d.py").write_bytes(b"z = '\xe9'\n")
    tally = Tally()
    found = documents(config.data, tuple(matching_files([f"{tmp_path}/*.py"])), tally)
    assert [d.text for d in found] == [latin, "y = 1\n"]
    assert tally == Tally(skipped=2)


def test_the_standard_library_without_other_peoples_code() -> None:
    names = [file.name for file in stdlib_files()]
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py"} <= set(names)
    assert not any({"site-packages", "test", "tests"} & set(name.split("/")) for name in names)


def side(text: str, seed: int, share: float) -> bool:
    """SPLIT-1 once more, in integers."""
    inner = hashlib.sha256(text.encode()).hexdigest()
    return int(hashlib.sha256(f"{seed}:{inner}".encode()).hexdigest()[:16], 16) / 2**64 < share


def test_the_side_is_a_function_of_seed_and_text() -> None:
    """SPLIT-1; about the share asked for, another for another seed, growing with the share."""
    digests = {t: hashlib.sha256(t.encode()).hexdigest() for t in (f"text {i}" for i in range(3000))}
    held = {
        (s, h): {t for t, d in digests.items() if is_held_out(d, s, h)} for s in (1, 42) for h in (0.05, 0.2)
    }
    for (seed, share), chosen in held.items():
        assert chosen == {t for t in digests if side(t, seed, share)}
        assert abs(len(chosen) / 3000 - share) < 0.02
    assert held[42, 0.05] < held[42, 0.2]
    assert held[1, 0.05] != held[42, 0.05]
    assert not any(is_held_out(d, 42, 0.0) for d in digests.values())


def sides(root: Path, contents: list[str], **changes: Any) -> tuple[list[str], list[str]]:
    """Texts of both sides as they are stored."""
    config = small_config(root, write_corpus(root / f"c{len(list(root.iterdir()))}", contents), **changes)
    prepared(config)
    data = open_data(config)
    decode = [
        [bytes(p.source.read(i, 0, n - 1).astype("u1")).decode() for i, n in enumerate(p.source.lengths)]
        for p in (data.train, data.heldout)
    ]
    return decode[0], decode[1]


def test_sides_are_disjoint_cover_and_do_not_move(tmp_path: Path) -> None:
    """SPLIT-1, SPLIT-2: also with documents added, reordered and doubled."""
    contents = texts(40)
    train, heldout = sides(tmp_path, contents)
    assert sorted(train + heldout) == sorted(contents)
    assert [t for t in contents if side(t, 42, 0.2)] == heldout
    doubled = [*reversed(contents), "one more", contents[3], contents[5]]
    train2, heldout2 = sides(tmp_path, doubled)
    assert set(train) <= set(train2)
    assert set(heldout) == set(heldout2) - {"one more"}
    assert len(train2) + len(heldout2) == 43


def test_a_side_left_empty_is_an_error_with_the_counts(tmp_path: Path) -> None:
    """SPLIT-3."""
    with pytest.raises(UserError, match="7 training and 0 held-out") as caught:
        sides(tmp_path, texts(7), data__holdout=1e-6)
    assert caught.value.code == 4
    assert sides(tmp_path, texts(7), data__holdout=0)[1] == []
    with pytest.raises(UserError, match="0 training and 7 held-out"):
        sides(tmp_path, texts(7), data__holdout=1 - 1e-12)
    with pytest.raises(UserError, match="holds no document with text"):
        sides(tmp_path, ["", ""])
