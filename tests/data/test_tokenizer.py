"""Tokenizers (TOK-2, TOK-4, TOK-5) and token files (STORE-6)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.config import TokenizerConfig
from src.errors import UserError
from src.trainer.data.bpe import sample_texts, train_bpe
from src.trainer.data.corpus import open_data
from src.trainer.data.documents import Document
from src.trainer.data.keys import BOS, EOS
from src.trainer.data.tokenizer import ByteTokenizer, LibraryTokenizer, Tokenizer, load_tokenizer
from src.trainer.data.tokens import TokenFile, TokenWriter, dtype_for
from tests.data.small import prepared, small_config, texts, write_corpus

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trained() -> str:
    return train_bpe(texts(), 400)


@pytest.fixture(scope="module", params=["bpe", "bytes"])
def tokenizer(request: pytest.FixtureRequest, trained: str) -> Tokenizer:
    return ByteTokenizer() if request.param == "bytes" else LibraryTokenizer(trained, EOS, BOS)


@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    """TOK-5 for arbitrary valid UTF-8."""
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.eos not in ids
    assert tokenizer.bos not in ids


def test_the_spelling_of_a_special_token_stays_text(tokenizer: Tokenizer) -> None:
    """TOK-2."""
    text = f"a{EOS}b{BOS}"
    ids = tokenizer.encode(text)
    assert not {tokenizer.eos, tokenizer.bos} & set(ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos]) == text + EOS
    batch = tokenizer.encode_batch([text, "", "x"])
    assert [b.tolist() for b in batch] == [ids, [], tokenizer.encode("x")]


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
@pytest.mark.parametrize("bos", [False, True])
def test_separators_add_up(tmp_path: Path, kind: str, bos: bool) -> None:
    """TOK-2 with an empty document (dropped, counted) and one that spells EOS."""
    contents = [*texts(20), "", f"x {EOS} y", "z"]
    config = small_config(tmp_path, write_corpus(tmp_path / "c", contents), tokenizer__kind=kind)
    config.tokenizer.bos = bos
    prepared(config)
    data = open_data(config)
    tokenizer = data.tokenizer
    assert tokenizer is not None
    stored = []
    for packed, side in ((data.train, "train"), (data.heldout, "heldout")):
        for document, length in enumerate(packed.source.lengths.tolist()):
            stored.append(packed.source.read(document, 0, length).tolist())
        assert data.manifest["tokens"][side] == packed.source.lengths.sum()
        assert data.manifest["documents"][side] == len(packed.source.lengths)
    assert data.manifest["left_out"] == {"empty": 1, "skipped": 0, "replaced": 0}
    expected = [[*[tokenizer.bos] * bos, *tokenizer.encode(t), tokenizer.eos] for t in contents if t]
    assert sorted(stored) == sorted(expected)
    assert sum(data.manifest["text_bytes"].values()) == sum(len(t.encode()) for t in contents)
    assert data.manifest["max_id"] == max(map(max, stored))


def corpus_of(contents: list[str]) -> list[Document]:
    return [Document(t, len(t.encode()), hashlib.sha256(t.encode()).hexdigest()) for t in contents]


def test_the_sample_ignores_document_order_and_keeps_its_limit() -> None:
    """TOK-4: chosen by tokenizer.seed alone."""
    contents = [*texts(50), *texts(5)]
    config = TokenizerConfig(sample_bytes=3001)
    sample = sample_texts(lambda: iter(corpus_of(contents)), config)
    assert sum(len(t.encode()) for t in sample) in range(2998, 3002)
    assert all(any(t.startswith(s) for t in contents) for s in sample)
    assert sum(s not in contents for s in sample) <= 1
    assert sample_texts(lambda: iter(corpus_of(contents[::-1])), config) == sample
    assert (
        sample_texts(lambda: iter(corpus_of(contents)), TokenizerConfig(sample_bytes=3001, seed=1)) != sample
    )
    whole = sample_texts(lambda: iter(corpus_of(contents)), TokenizerConfig(sample_bytes=10**9))
    assert sorted(whole) == sorted(contents)


def test_training_gives_equal_bytes_for_threads_and_hash_seeds(trained: str) -> None:
    """TOK-4."""
    program = f"""
import sys, hashlib
sys.path.insert(0, {str(ROOT)!r})
from src.trainer.data.bpe import train_bpe
from tests.data.small import texts
print(hashlib.sha256(train_bpe(texts(), 400).encode()).hexdigest())
"""
    found = set()
    for threads, seed in (("1", "0"), ("3", "99")):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        found.add(run.stdout.strip())
    assert found == {hashlib.sha256(trained.encode()).hexdigest()}


def test_merges_stay_within_words(trained: str) -> None:
    """TOK-4: as GPT-2's pattern cuts text, no entry holds a blank anywhere but at its start."""
    entries = json.loads(trained)["model"]["vocab"]
    assert max(map(len, entries)) > 4
    assert not [entry for entry in entries if "Ġ" in entry[1:] and entry.strip("Ġ")]


def test_neighbours_of_the_first_tokens_alone(tmp_path: Path) -> None:
    """EVAL-5 of a large corpus: counts stop at a number of tokens, in the middle of a document."""
    with TokenWriter(tmp_path, "train", 300) as writer:
        for ids in ([1, 2, 3], [4, 5], [6, 7, 8, 9]):
            writer.add(np.array(ids))
    found = TokenFile(tmp_path, "train", 300)
    pairs = {
        limit: [*zip(*(x.tolist() for x in found.neighbours(limit)), strict=True)] for limit in (2, 3, 7, 99)
    }
    assert pairs[99] == [(1, 2), (2, 3), (4, 5), (6, 7), (7, 8), (8, 9)]
    assert [len(pairs[limit]) for limit in (2, 3, 7)] == [1, 2, 4]
    assert all(pairs[limit] == pairs[99][: len(pairs[limit])] for limit in pairs)


def test_split_seeds_share_the_tokenizer(tmp_path: Path) -> None:
    """TOK-4, STORE-3: other held-out documents, the same entries; both artifacts stay."""
    first = small_config(tmp_path, tokenizer__kind="bpe")
    second = small_config(tmp_path, tokenizer__kind="bpe", data__split_seed=1)
    assert prepared(first).path != prepared(second).path
    one, two = open_data(first), open_data(second)
    assert one.manifest["tokenizer"] == two.manifest["tokenizer"]
    assert one.manifest["documents"] != two.manifest["documents"]
    assert not prepared(first).built


def test_a_directory_of_hugging_face_files(tmp_path: Path, trained: str) -> None:
    """`hf` gives the library's ids, whatever truncation its file asks for; specials are its settings'."""
    directory = tmp_path / "hf"
    directory.mkdir()
    cut = {"max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    whole = {**json.loads(trained), "truncation": cut}
    (directory / "tokenizer.json").write_text(json.dumps(whole))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": BOS}}))
    loaded = load_tokenizer(TokenizerConfig(kind="hf", path=str(directory)), None)
    plain = LibraryTokenizer(trained, EOS, BOS)
    text = texts()[3]
    assert loaded.encode(text) == plain.encode(text)
    assert (loaded.eos, loaded.bos) == (plain.bos, None)
    config = small_config(tmp_path, tokenizer__kind="hf", tokenizer__path=str(directory))
    prepared(config)
    data = open_data(config)
    assert data.manifest["vocab_size"] == plain.vocab_size
    config.model.vocab_size = data.manifest["max_id"]
    with pytest.raises(
        UserError, match=rf"id {data.manifest['max_id']}.*is {data.manifest['max_id']}"
    ) as caught:
        open_data(config)
    assert caught.value.code == 2


def test_another_tokenizer_is_refused_at_the_start(tmp_path: Path) -> None:
    """TOK-3: its files changed between preparation and a rank's start."""
    directory = tmp_path / "hf"
    directory.mkdir()
    (directory / "tokenizer.json").write_text(train_bpe(texts(), 400))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    config = small_config(tmp_path, tokenizer__kind="hf", tokenizer__path=str(directory))
    key = prepared(config).key
    open_data(config, key)
    (directory / "tokenizer.json").write_text(train_bpe(texts(), 300))
    with pytest.raises(
        UserError, match=r"tokenizer [0-9a-f]{16} of the config is not [0-9a-f]{16}"
    ) as caught:
        open_data(config, key)
    assert caught.value.code == 2


def test_a_tokenizer_trained_otherwise_is_refused(tmp_path: Path) -> None:
    """TOK-3: the recipe's name is the same, the content is not that of the data."""
    config = small_config(tmp_path, tokenizer__kind="bpe")
    prepared(config)
    data = open_data(config)
    other = dataclasses.replace(data, manifest={**data.manifest, "tokenizer": "0" * 64})
    assert data.tokenizer is not None
    with pytest.raises(UserError, match=rf"{data.manifest['tokenizer'][:16]} is not 0000") as caught:
        _ = other.tokenizer
    assert caught.value.code == 2


def test_text_without_a_token_leaves_nothing_to_learn_from(tmp_path: Path) -> None:
    """A tokenizer that knows none of the characters: each document is its EOS alone."""
    directory = tmp_path / "hf"
    directory.mkdir()
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, EOS: 2}, "merges": []}
    added = {"id": 2, "content": EOS, "special": True, "normalized": False}
    added |= {"single_word": False, "lstrip": False, "rstrip": False}
    (directory / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": [added]}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    corpus = write_corpus(tmp_path / "c", [f"{i}" for i in range(9)])
    config = small_config(tmp_path, corpus, tokenizer__kind="hf", tokenizer__path=str(directory))
    prepared(config)
    with pytest.raises(UserError, match="no two tokens in a row") as caught:
        open_data(config)
    assert caught.value.code == 4


def test_ids_up_to_151_935_and_long_documents(tmp_path: Path) -> None:
    """STORE-6."""
    documents = [[151_935, 0, 65_536], list(np.arange(70_000) % 131), [65_535]]
    with TokenWriter(tmp_path, "train", 151_936) as writer:
        for ids in documents:
            writer.add(np.array(ids))
    assert (writer.max_id, writer.documents, writer.tokens) == (151_935, 3, 70_004)
    found = TokenFile(tmp_path, "train", 151_936)
    assert [found.read(i, 0, n).tolist() for i, n in enumerate(found.lengths)] == documents
    assert found.read(1, 69_990, 10).tolist() == documents[1][69_990:]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "uint32"), (300, "uint16")])
def test_the_width_follows_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    assert dtype_for(vocab_size) == dtype
    with TokenWriter(tmp_path, "train", vocab_size) as writer:
        writer.add(np.array([vocab_size - 1]))
        for bad in (vocab_size, -1):
            with pytest.raises(UserError, match=f"{bad}.*{vocab_size}"):
                writer.add(np.array([0, bad]))
    assert (tmp_path / "train.bin").stat().st_size == np.dtype(dtype).itemsize


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    """STORE-6 on open: truncated or odd files, another width, unordered offsets: 4, file, place."""
    with TokenWriter(tmp_path, "train", 300) as writer:
        for ids in ([1, 2, 3], [4], [5, 6]):
            writer.add(np.array(ids))
    assert TokenFile(tmp_path, "train", 300).lengths.tolist() == [3, 1, 2]
    with pytest.raises(UserError, match=r"train\.bin has 12 bytes.*6 ids of uint32"):
        TokenFile(tmp_path, "train", 65_537)
    for size in (11, 10, 0):
        os.truncate(tmp_path / "train.bin", size)
        with pytest.raises(UserError, match=rf"train\.bin has {size} bytes.*6 ids") as caught:
            TokenFile(tmp_path, "train", 300)
        assert caught.value.code == 4
    os.truncate(tmp_path / "train.bin", 12)
    for offsets, words in (
        ([0, 4, 3, 6], "offset 2 is 3"),
        ([0, 3, 3, 6], "offset 2"),
        ([1, 6], "offset 0 is 1"),
    ):
        (tmp_path / "train.idx").write_bytes(np.array(offsets, "<i8").tobytes())
        with pytest.raises(UserError, match=rf"train\.idx: {words}") as caught:
            TokenFile(tmp_path, "train", 300)
        assert caught.value.code == 4
    for content in (b"", b"\0" * 9):
        (tmp_path / "train.idx").write_bytes(content)
        with pytest.raises(UserError, match=rf"train\.idx has {len(content)} bytes"):
            TokenFile(tmp_path, "train", 300)
