"""Names of data by content (STORE-1, STORE-2, PREP-2, CORPUS-1, CORPUS-4, TOK-1, TOK-3, CFG-18)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from src.config import Config
from src.errors import UserError
from src.trainer.data import files, keys
from tests.data.small import prepared, small_config, synthetic_config, texts, write_corpus

ROOT = Path(__file__).parents[2]


def settle(directory: Path) -> None:
    """Make every file look older than the cache's margin, at a time of its own."""
    for i, path in enumerate(sorted(directory.rglob("*.txt"))):
        then = time.time_ns() - (100 + i) * 10**9
        os.utime(path, ns=(then, then))


def test_one_value_in_fresh_processes_without_heavy_imports(tmp_path: Path) -> None:
    """STORE-1 under two hash seeds, with a cold and a warm cache; CFG-18 for what computing a key imports."""
    config = small_config(tmp_path, tokenizer__kind="bpe")
    program = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.data.small import small_config
from src.trainer.data import keys
config = small_config(Path({str(tmp_path)!r}), tokenizer__kind="bpe")
print(keys.data_key(config), keys.identify(config).tokenizer_key)
print(*{{"torch", "tokenizers", "datasets", "transformers"}} & set(sys.modules))
"""
    found = set()
    for hash_seed in ("0", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        found.add(run.stdout)
    identity = keys.identify(config, remember=True)
    assert found == {f"{identity.key} {identity.tokenizer_key}\n\n"}
    assert keys.identify(config) == identity


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 9},
        {"data__shuffle_seed": 9},
        {"mesh__ep": 4},
        {"global_batch_size": 64},
        {"micro_batch_size": 1},
        {"sequence_length": 100},
        {"data__packing": "none"},
        {"data__epoch_tail": "drop"},
        {"run_name": "x"},
        {"launcher__name": "slurm"},
        {"backend__name": "transformers"},
        {"data__prepare__workers": 3},
        {"paths__runs": "elsewhere"},
        {"evaluation__samples": 3},
        {"evaluation__name": "none"},
    ],
)
def test_nothing_of_the_run_enters(tmp_path: Path, changes: dict[str, Any]) -> None:
    """STORE-2, and SPLIT-2: whether one evaluates changes nothing."""
    assert keys.data_key(small_config(tmp_path, **changes)) == keys.data_key(small_config(tmp_path))


@pytest.mark.parametrize(
    ("changes", "tokenizer_changes"),
    [
        ({"data__split_seed": 1}, False),
        ({"data__holdout": 0.3}, False),
        ({"tokenizer__bos": True}, False),
        ({"data__on_bad_text": "skip"}, True),
        ({"data__unit": "line"}, True),
        ({"tokenizer__vocab_size": 301}, True),
        ({"tokenizer__seed": 1}, True),
        ({"tokenizer__sample_bytes": 1000}, True),
        ({"data__identity": "stat"}, True),
    ],
)
def test_what_enters(tmp_path: Path, changes: dict[str, Any], tokenizer_changes: bool) -> None:
    """PREP-2 and the fields of STORE-1; the split never enters a trained tokenizer (TOK-4)."""
    before = small_config(tmp_path, tokenizer__kind="bpe")
    after = small_config(tmp_path, tokenizer__kind="bpe", **changes)
    assert keys.data_key(before) != keys.data_key(after)
    one, two = keys.identify(before), keys.identify(after)
    assert (one.tokenizer_key != two.tokenizer_key) == tokenizer_changes


def test_a_key_is_pinned(tmp_path: Path) -> None:
    """STORE-3: only a change of `format` invalidates; any other that moves this key empties every store."""
    config = small_config(tmp_path, write_corpus(tmp_path / "c", ["a\n", "b\n"]))
    assert keys.data_key(config) == "384292547cc03cc0"
    assert keys.data_key(small_config(tmp_path, tmp_path / "c", data__holdout=0)) == keys.data_key(
        small_config(tmp_path, tmp_path / "c", data__holdout=0.0)
    )


def test_the_library_that_trains_enters_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TOK-4: another version may merge otherwise; bytes need none."""
    trained, plain = small_config(tmp_path, tokenizer__kind="bpe"), small_config(tmp_path)
    before = keys.data_key(trained), keys.data_key(plain)
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"99 of {name}")
    assert keys.data_key(trained) != before[0]
    assert keys.data_key(plain) == before[1]


def test_identity_by_stat_is_recorded(tmp_path: Path) -> None:
    """CORPUS-4: who reads the manifest sees that no content was hashed."""
    assert "identity" not in keys.identify(small_config(tmp_path)).record["corpus"]
    record = keys.identify(small_config(tmp_path, data__identity="stat")).record
    assert record["corpus"]["identity"] == "stat"


def test_the_text_key_enters_where_it_is_read(tmp_path: Path) -> None:
    def key(unit: str, text_key: str) -> str | None:
        return keys.data_key(small_config(tmp_path, data__unit=unit, data__text_key=text_key))

    assert key("line", "text") != key("line", "body")
    assert key("file", "text") == key("file", "body")


def test_content_and_name_of_files_enter_but_not_their_place(tmp_path: Path) -> None:
    """CORPUS-1: a changed file gives another key, and its old content the old one."""
    corpus = write_corpus(tmp_path / "one", texts(5))
    write_corpus(tmp_path / "two", texts(5))
    config = small_config(tmp_path, corpus)
    key = keys.data_key(config)
    assert keys.data_key(small_config(tmp_path, tmp_path / "two")) == key
    changed = corpus / "0003.txt"
    changed.write_text(changed.read_text().swapcase())
    assert keys.data_key(config) != key
    changed.write_text(changed.read_text().swapcase())
    assert keys.data_key(config) == key
    changed.rename(corpus / "0009.txt")
    assert keys.data_key(config) != key


def test_a_second_start_opens_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CORPUS-4; and a plan writes nothing (CFG-17)."""
    config = small_config(tmp_path)
    settle(tmp_path / "corpus")
    keys.data_key(config)
    assert not (tmp_path / "store").exists()
    identity = keys.identify(config, remember=True)
    monkeypatch.setattr(files, "hash_file", lambda path: pytest.fail(f"opened {path}"))
    assert keys.identify(config) == identity
    (tmp_path / "corpus" / "0001.txt").write_text("new")
    with pytest.raises(pytest.fail.Exception, match=r"0001\.txt"):
        keys.identify(config)


def test_a_file_written_just_now_is_not_remembered(tmp_path: Path) -> None:
    """Two writes within one clock tick have one time; the second one must be seen."""
    config = small_config(tmp_path)
    path = tmp_path / "corpus" / "0001.txt"
    stat = path.stat()
    before = keys.identify(config, remember=True).key
    path.write_bytes(bytes(reversed(path.read_bytes())))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert keys.identify(config, remember=True).key != before


def test_a_broken_cache_costs_only_time(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    settle(tmp_path / "corpus")
    identity = keys.identify(config, remember=True)
    cache = tmp_path / "store" / "hashes"
    lines = cache.read_text().splitlines()
    assert len(lines) == 60
    cache.write_text("\n".join([lines[0][:40], "", "x", *lines[2:]]))
    assert keys.identify(config, remember=True) == identity
    assert set(lines) <= set(cache.read_text().splitlines())
    cache.write_bytes(b"\xff\xfe\x00")
    assert keys.identify(config) == identity


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    """CORPUS-4 below a store that is read-only: here there is a file where its directory would be."""
    config = small_config(tmp_path)
    settle(tmp_path / "corpus")
    (tmp_path / "store").write_text("no directory")
    assert keys.identify(config, remember=True) == keys.identify(config)


@pytest.mark.slow
def test_of_100_000_warm_files_none_is_opened(tmp_path: Path) -> None:
    """CORPUS-4: the hashes that come back are the remembered ones, which no content has."""
    corpus = tmp_path / "corpus"
    for d in range(100):
        (corpus / f"{d:02d}").mkdir(parents=True)
        for i in range(1000):
            (corpus / f"{d:02d}" / f"{i:03d}.txt").touch()
    found = files.matching_files([f"{corpus}/**/*.txt"])
    lines = [" ".join([*map(str, f.stat), "0" * 64]) for f in found]
    store = tmp_path / "store"
    store.mkdir()
    (store / "hashes").write_text("\n".join(lines))
    config = small_config(tmp_path)
    identity = keys.identify(config)
    assert len(identity.files) == 100_000
    assert {digest for _, digest in identity.files} == {"0" * 64}


def test_a_glob_without_a_match_and_an_unreadable_file_are_named(tmp_path: Path) -> None:
    """CORPUS-1."""
    config = small_config(tmp_path)
    config.data.files += [str(tmp_path / "nothing*.txt")]
    with pytest.raises(UserError, match=r"nothing\*\.txt") as caught:
        keys.data_key(config)
    assert caught.value.code == 4
    (tmp_path / "corpus" / "0002.txt").unlink()
    (tmp_path / "corpus" / "0002.txt").symlink_to(tmp_path / "corpus" / "0002.txt")
    config.data.files = [str(tmp_path / "corpus" / "0002.txt")]
    with pytest.raises(UserError, match=r"0002\.txt"):
        keys.data_key(config)


def hf_directory(directory: Path, tokenizer: dict[str, Any], **settings: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", **settings}))
    return directory


HF = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    "added_tokens": [{"id": 6, "content": "</s>"}],
}


def test_identity_of_a_hugging_face_tokenizer_is_content(tmp_path: Path) -> None:
    """TOK-1: use, name and place change nothing; vocabulary, specials and template do."""
    plain = hf_directory(tmp_path / "plain", HF)
    used = hf_directory(
        tmp_path / "used", {"truncation": {"max_length": 5}, "padding": {"strategy": "Fixed"}, **HF}
    )
    other = hf_directory(tmp_path / "other", {**HF, "model": {**HF["model"], "vocab": {"a": 1, "b": 0}}})
    special = hf_directory(tmp_path / "special", HF, bos_token={"content": "<s>"})
    chat = hf_directory(tmp_path / "chat", HF, chat_template="{{ messages }}")

    apart = hf_directory(tmp_path / "apart", HF)
    (apart / "chat_template.jinja").write_text("{{ messages }}")

    def key(path: Path) -> str:
        config = small_config(tmp_path, tokenizer__kind="hf", tokenizer__path=str(path))
        return keys.identify(config).tokenizer_key

    assert key(plain) == key(used)
    assert key(chat) == key(apart)
    assert len({key(p) for p in (plain, other, special, chat)}) == 4
    config = small_config(tmp_path, tokenizer__kind="hf", tokenizer__path=str(plain))
    assert keys.vocab_size(config) == 7
    assert keys.check(config) == []
    config.tokenizer.bos = True
    assert "bos_token" in str(keys.check(config)[0])


def bad(**changes: Any) -> Config:
    return small_config(Path("nowhere"), Path("nowhere"), **changes)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        *[(bad(data__kind=kind), [kind, "reserved"]) for kind in keys.RESERVED],
        (bad(data__prefetch=0), ["data.prefetch"]),
        (bad(data__prepare__workers=-1), ["data.prepare.workers"]),
        (bad(sequence_length=1), ["sequence_length"]),
        (bad(data__files=[]), ["data.files"]),
        (bad(data__holdout=1.0), ["data.holdout"]),
        (bad(data__holdout=float("nan")), ["data.holdout"]),
        (bad(data__holdout=0), ["evaluation", "SPLIT-3"]),
        (bad(tokenizer__kind="none"), ["tokenizer"]),
        (bad(tokenizer__kind="bpe", tokenizer__vocab_size=257), ["tokenizer.vocab_size", "256"]),
        (bad(tokenizer__kind="bpe", tokenizer__sample_bytes=0), ["tokenizer.sample_bytes"]),
        (bad(tokenizer__kind="hf"), ["tokenizer.path"]),
        (bad(tokenizer__kind="hf", tokenizer__path="/nowhere"), ["tokenizer.revision"]),
        (bad(tokenizer__kind="hf", tokenizer__path="a/b", tokenizer__revision="0" * 40), ["hf download a/b"]),
        (bad(model__vocab_size=257), ["257", "258", "TOK-3"]),
        (synthetic_config("uniform", tokenizer__kind="bpe", model__vocab_size=63), ["63", "64", "TOK-3"]),
        (synthetic_config("uniform", data__ids=3), ["data.ids"]),
        (synthetic_config("uniform", data__documents=0), ["data.documents"]),
        (synthetic_config("uniform", data__document_length=1), ["data.document_length"]),
        (synthetic_config("rules", data__document_length=9), ["data.document_length", "whole samples"]),
        (synthetic_config("rules", sequence_length=2), ["sequence_length", "EVAL-4"]),
    ],
)
def test_what_is_refused(config: Config, words: list[str]) -> None:
    """Rules of data and tokenizer that cross keys; each names what to look at."""
    (problem,) = keys.check(config)
    assert all(word in str(problem) for word in words)


def test_what_is_not_refused() -> None:
    for config in (bad(), bad(tokenizer__kind="bpe"), bad(model__vocab_size=258), synthetic_config("copy")):
        assert keys.check(config) == []
    with_tokenizer = synthetic_config("copy")
    with_tokenizer.tokenizer.kind = "bpe"
    assert [p.key for p in keys.check(with_tokenizer)] == ["tokenizer"]


def test_synthetic_data_has_no_key_and_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PREP-4."""
    monkeypatch.chdir(tmp_path)
    config = synthetic_config("uniform")
    assert keys.data_key(config) is None
    assert keys.vocab_size(config) == 64
    assert prepared(config).key is None
    assert list(tmp_path.iterdir()) == []
