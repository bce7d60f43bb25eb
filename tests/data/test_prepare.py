"""Preparation through the store (PREP-1, PREP-3, PREP-7, PREP-8, STORE-3, STORE-4)."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from scripts import prepare_data
from src.errors import UserError
from src.trainer.data import encode, prepare
from src.trainer.data.bpe import build_bpe
from src.trainer.data.corpus import open_data
from src.trainer.data.documents import Document, Tally
from src.trainer.data.lease import LeaseLost, claim
from src.trainer.data.prepare import Prepared
from src.trainer.data.store import Store
from src.trainer.data.tokenizer import ByteTokenizer, LibraryTokenizer
from tests.data.small import prepared, small_config, start, texts, write_corpus


@pytest.fixture
def tok(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Texts of each tokenise call."""
    calls: list[int] = []
    for kind in (ByteTokenizer, LibraryTokenizer):
        plain = kind.encode_batch

        def counted(self: object, found: list[str], plain=plain) -> object:  # type: ignore[no-untyped-def]
            calls.append(len(found))
            return plain(self, found)

        monkeypatch.setattr(kind, "encode_batch", counted)
    return calls


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_a_sweep_over_seeds_tokenises_once(tmp_path: Path, tok: list[int], kind: str) -> None:
    """PREP-1, PREP-2, STORE-3: seeds and lengths cost nothing, a split seed once, going back nothing."""
    found = [prepared(small_config(tmp_path, tokenizer__kind=kind, seed=s)) for s in range(3)]
    assert (sum(tok), [p.built for p in found]) == (60, [True, False, False])
    assert len({p.key for p in found}) == 1
    other = prepared(small_config(tmp_path, tokenizer__kind=kind, data__split_seed=1))
    assert (sum(tok), other.built) == (120, True)
    assert other.key != found[0].key
    prepared(small_config(tmp_path, tokenizer__kind=kind, sequence_length=77, data__packing="none"))
    assert prepared(small_config(tmp_path, tokenizer__kind=kind)) == Prepared(
        found[0].key, found[0].path, False
    )
    assert sum(tok) == 120


def contents(path: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in path.iterdir()}


@pytest.mark.slow
def test_four_starters_on_an_empty_store_build_once(tmp_path: Path) -> None:
    """PREP-1 with concurrent processes."""
    small_config(tmp_path)
    for path in (tmp_path / "corpus").rglob("*.txt"):
        os.utime(path, (1, 1))  # what has changed just now is not remembered in the cache of hashes
    context = multiprocessing.get_context("spawn")
    starters = [context.Process(target=start, args=(tmp_path, seed)) for seed in range(4)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join(120)
    assert [starter.exitcode for starter in starters] == [0] * 4
    store = tmp_path / "store"
    assert sorted(p.name for p in store.iterdir()) == ["hashes", "packs", "tokenizers", "tokens"]
    for section in ("packs", "tokenizers", "tokens"):
        assert len(list((store / section).glob("*/manifest.json"))) == 1
        assert not list((store / section).glob(".tmp*"))
    assert not prepared(small_config(tmp_path, tokenizer__kind="bpe")).built


def test_bytes_do_not_depend_on_batches_or_on_the_builder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PREP-8 in one process: any batch size, and a second build of the same key."""
    config = small_config(tmp_path, tokenizer__kind="bpe")
    found = []
    for size in (1, 700, 2**20):
        monkeypatch.setattr(encode, "BATCH_BYTES", size)
        path = prepared(config).path
        assert path is not None
        found.append(contents(path))
        shutil.rmtree(tmp_path / "store")
    assert found[0] == found[1] == found[2]
    assert set(found[0]) == {
        "manifest.json",
        *(f"{s}.{e}" for s in ("train", "heldout") for e in ("bin", "idx")),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_bytes_do_not_depend_on_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """PREP-8 for 1, 2 and 7 spawned workers, after an encode in the parent (PREP-9)."""
    monkeypatch.setattr(encode, "BATCH_BYTES", 900)
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    found = []
    for workers in (0, 1, 2, 7):
        path = prepared(small_config(tmp_path, tokenizer__kind=kind, data__prepare__workers=workers)).path
        assert path is not None
        found.append(contents(path))
        shutil.rmtree(tmp_path / "store")
    assert all(f == found[0] for f in found)
    assert "TOKENIZERS_PARALLELISM" not in os.environ


@pytest.mark.slow
def test_a_killed_worker_fails_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "_encode_in_worker", kill_worker)
    with pytest.raises(UserError, match=r"worker.*killed") as caught:
        prepared(small_config(tmp_path, data__prepare__workers=2))
    assert caught.value.code == 4
    assert not list((tmp_path / "store" / "tokens").glob(".tmp*"))


def test_workers_are_spawned_and_alone_silence_their_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PREP-9: the pool is asked for spawned processes, whose first act sets the variable."""
    seen: list[object] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, workers: int, context: Any, first: Any) -> None:
            seen.extend([workers, context.get_start_method(), first])
            super().__init__(workers)

    monkeypatch.setattr(encode, "ProcessPoolExecutor", Pool)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    assert prepared(small_config(tmp_path, data__prepare__workers=3)).built
    assert seen == [3, "spawn", encode._start_worker]
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    encode._start_worker()
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


def test_few_batches_wait_for_workers() -> None:
    """PREP-10: what is in memory is bounded by the look-ahead, not by the corpus; the order is kept."""
    made = []

    def batches() -> Any:
        for i in range(50):
            made.append(i)
            yield [Document(str(i), 1, "")]

    def submit(found: list[str]) -> Any:
        done: Future[list[str]] = Future()
        done.set_result([f"ids of {found[0]}"])
        return done

    got = []
    for (document,), (ids,) in encode._in_order(batches(), submit, 6):
        got.append(document.text)
        assert ids == f"ids of {document.text}"
        assert len(made) - len(got) <= 6
    assert got == [str(i) for i in range(50)]


def test_a_robbed_builder_stops_at_its_next_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LEASE-4: tokenising an hour of text for nobody helps nobody; so with the tokenizer's sample."""
    monkeypatch.setattr(encode, "BATCH_BYTES", 1)
    config = small_config(tmp_path)
    held = claim(tmp_path / "lease")
    read = []

    def corpus() -> Any:
        for i in range(9):
            read.append(i)
            if i == 3:
                held.path.unlink(missing_ok=True)
            yield Document(f"text {i}", 6, hashlib.sha256(str(i).encode()).hexdigest())

    with pytest.raises(LeaseLost):
        encode.build_tokens(config, corpus(), Tally(), None, tmp_path, held)
    assert read == [0, 1, 2, 3]
    with pytest.raises(LeaseLost):
        build_bpe(corpus, config.tokenizer, tmp_path, held)
    assert not (tmp_path / "tokenizer.json").exists()
    held.release()


def kill_worker(*_: object) -> None:
    os.kill(os.getpid(), 9)


def test_preparation_changes_no_value(tmp_path: Path) -> None:
    """PREP-7."""
    config = small_config(tmp_path, tokenizer__kind="bpe")
    before = copy.deepcopy(config)
    prepared(config)
    open_data(config)
    assert config == before


def test_never_names_key_and_command_at_once(tmp_path: Path) -> None:
    """PREP-3."""
    config = small_config(tmp_path, data__prepare__where="never")
    for path in (tmp_path / "corpus").iterdir():
        os.utime(path, (1, 1))
    with pytest.raises(UserError, match=r"[0-9a-f]{16} is not ready.*prepare_data\.py") as caught:
        prepared(config)
    assert caught.value.code == 4
    assert not (tmp_path / "store").exists()
    found = prepared(small_config(tmp_path))
    assert prepared(config) == Prepared(found.key, found.path, False)
    config.sequence_length = 77
    with pytest.raises(UserError, match=r"packs.*manifest\.json is missing.*prepare_data\.py build"):
        prepared(config)
    assert len(list((tmp_path / "store" / "packs").glob("*/manifest.json"))) == 1


def test_a_tokenizer_that_is_gone_is_trained_again(tmp_path: Path) -> None:
    """STORE-5 for all three artifacts: tokens that are ready do not hide a tokenizer that is not."""
    config = small_config(tmp_path, tokenizer__kind="bpe")
    prepared(config)
    (tokenizer,) = (tmp_path / "store" / "tokenizers").glob("*/tokenizer.json")
    before = tokenizer.read_bytes()
    tokenizer.unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        open_data(config)
    assert not prepared(config).built
    assert tokenizer.read_bytes() == before
    assert open_data(config).tokenizer is not None


def test_a_ready_store_is_read_without_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """STORE-3: on a read-only file system a second start works, though it has hashes to remember."""
    config = small_config(tmp_path, tokenizer__kind="bpe")
    first = prepared(config)
    for path in (tmp_path / "corpus").iterdir():
        os.utime(path, (1, 1))
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "store").rglob("*")}

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("mkdir", "write_text", "write_bytes", "replace", "rename", "unlink"):
        monkeypatch.setattr(Path, name, read_only)
    assert prepared(config).path == first.path
    open_data(config)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "store").rglob("*")} == before


def test_nothing_depends_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """STORE-8: all writes are below `paths.data`."""
    config = small_config(tmp_path, tokenizer__kind="bpe")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    before = set(tmp_path.rglob("*"))
    prepared(config)
    assert all(p.is_relative_to(tmp_path / "store") for p in set(tmp_path.rglob("*")) - before)


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_the_space_that_a_full_disk_is_told_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """STORE-8: for each of the artifacts."""
    needs: dict[str, int] = {}
    plain = Store.ensure

    def ensure(self: Store, section: str, record: Any, build: Any, space: int) -> Any:
        needs[section] = space
        return plain(self, section, record, build, space)

    monkeypatch.setattr(Store, "ensure", ensure)
    prepared(small_config(tmp_path, tokenizer__kind=kind))
    for section, space in needs.items():
        files = [p for p in (tmp_path / "store" / section).glob("*/*") if p.name != "manifest.json"]
        assert 0 < sum(p.stat().st_size for p in files) <= space
    assert len(needs) == (3 if kind == "bpe" else 2)


def test_open_data_builds_nothing(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    with pytest.raises(UserError, match=r"not ready.*prepare_data\.py") as caught:
        open_data(config)
    assert caught.value.code == 4
    assert not (tmp_path / "store").exists()
    key = prepared(config).key
    (tmp_path / "corpus" / "0000.txt").write_text("the corpus moves on")
    with pytest.raises(UserError):
        open_data(config)
    assert open_data(config, key).key == key


def test_too_little_to_train_on_is_refused(tmp_path: Path) -> None:
    """ORDER-5: `drop` with less than a batch."""
    config = small_config(tmp_path, data__epoch_tail="drop", global_batch_size=10_000)
    prepared(config)
    with pytest.raises(UserError, match=r"samples at global_batch_size=10000") as caught:
        open_data(config)
    assert caught.value.code == 2
    config.data.epoch_tail = "carry"
    assert len(open_data(config).train) > 0


def test_a_broken_artifact_is_built_again(tmp_path: Path) -> None:
    """STORE-5 from the outside, and the event is reported."""
    config = small_config(tmp_path)
    path = prepared(config).path
    assert path is not None
    before = contents(path)
    os.truncate(path / "train.bin", 5)
    lines: list[str] = []
    assert prepare.prepare(config, lines.append).built
    assert contents(path) == before
    assert any("train.bin" in line and ".bad-" in line for line in lines)


def test_the_command_builds_and_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same key as `train.py` would have; a flipped byte ends in 4 with the file's name."""
    corpus = write_corpus(tmp_path / "corpus", texts(20))
    overrides = [
        "data=text_files",
        f"data.files=[{corpus}/*.txt]",
        "tokenizer=bytes",
        "data.holdout=0.3",
        f"paths.data={tmp_path}/store",
    ]
    assert prepare_data.main(["build", "--verify", *overrides]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["built"]
    assert [Path(p).parent.name for p in said["verified"]] == ["tokens", "packs"]
    assert prepare_data.main(["build", *overrides]) == 0
    assert json.loads(capsys.readouterr().out) == {**said, "built": False, "verified": []}
    file = Path(said["path"]) / "heldout.bin"
    content = bytearray(file.read_bytes())
    content[7] ^= 1
    file.write_bytes(bytes(content))
    assert prepare_data.main(["build", "--verify", *overrides]) == 4
    assert "heldout.bin" in capsys.readouterr().err
    assert prepare_data.main(["build", "data.holdot=1"]) == 2


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("repetition", range(20))
def test_four_starters_build_once_time_and_again(tmp_path: Path, repetition: int) -> None:
    """STORE-4, LEASE-1: 20 times."""
    test_four_starters_on_an_empty_store_build_once(tmp_path)


@pytest.mark.slow
@pytest.mark.soak
def test_killed_at_random_times_the_next_start_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """STORE-4, STORE-5, LEASE-2: nothing is taken for whole that is not, at 10 random times of death."""
    config = small_config(tmp_path, write_corpus(tmp_path / "corpus", texts(400)), tokenizer__kind="bpe")
    started = time.monotonic()
    start_and_wait(tmp_path)
    duration = time.monotonic() - started
    key, path = prepared(config).key, prepared(config).path
    assert path is not None
    expected = contents(path)
    for draw in random.Random(3).choices(range(100), k=10):
        shutil.rmtree(tmp_path / "store")
        start_and_wait(tmp_path, kill_after=duration * draw / 100)
        assert (prepared(config).key, contents(path)) == (key, expected)
        assert not list((tmp_path / "store").glob("*/.tmp*"))


def start_and_wait(root: Path, kill_after: float | None = None) -> None:
    starter = multiprocessing.get_context("spawn").Process(target=start, args=(root, 0))
    starter.start()
    starter.join(kill_after)
    starter.kill()
    starter.join()
