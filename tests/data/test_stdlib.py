"""The default corpus, whole: the standard library of this machine (STORE, TOK-4, TOK-5, PACK-2, EVAL-5)."""

from __future__ import annotations

import time

import pytest

from src.config import Config
from src.trainer.data.corpus import Data, open_data
from src.trainer.data.documents import Tally, documents
from src.trainer.data.files import stdlib_files
from src.trainer.data.pack import make_plan
from src.trainer.data.prepare import prepare

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    config = Config()
    config.paths.data = str(tmp_path_factory.mktemp("store"))
    config.data.on_bad_text = "skip"
    started = time.process_time()
    assert prepare(config, print).built
    assert time.process_time() - started < 60, "30 s on two idle cores are 60 s of work"
    return open_data(config)


def test_every_document_survives(data: Data) -> None:
    """TOK-5 and SPLIT-2: the decoded documents of both sides are those of the corpus."""
    tally = Tally()
    expected = [d.text for d in documents(data.config.data, tuple(stdlib_files()), tally)]
    tokenizer = data.tokenizer
    assert tokenizer is not None
    stored = []
    for packed in (data.train, data.heldout):
        for i, n in enumerate(packed.source.lengths.tolist()):
            ids = packed.source.read(i, 0, n)
            assert ids[-1] == tokenizer.eos
            stored.append(tokenizer.decode(ids[:-1].tolist()))
    assert sorted(stored) == sorted(expected)
    assert data.manifest["left_out"] == {"empty": tally.empty, "skipped": tally.skipped, "replaced": 0}


@pytest.mark.parametrize("positions", [256, 777, 2048, 8192])
def test_best_fit_fills(data: Data, positions: int) -> None:
    """PACK-2: at least 99.8 % of positions, and a label for every pair."""
    lengths = data.train.source.lengths
    plan = make_plan(lengths, positions, "best_fit")
    assert plan.tokens / (len(plan) * positions) >= 0.998
    assert (plan.pieces[:, 2] - 1).sum() == (lengths - 1).sum()


def test_lines_that_counts_reach(data: Data) -> None:
    """EVAL-5; the figures of Python 3.11, with room for other versions of the library."""
    lines = data.baselines
    assert lines.uniform == pytest.approx(9.0109, abs=1e-4)
    assert lines.frequencies == pytest.approx(6.67, abs=0.15)
    assert lines.pairs == pytest.approx(4.30, abs=0.25)
    assert lines.bytes_per_token == pytest.approx(3.8, abs=0.3)


def test_a_warm_start_is_quick(data: Data) -> None:
    """Opening reads an index and maps the rest; the least of three, for a busy machine."""
    spent = []
    for _ in range(3):
        started = time.process_time()
        prepare(data.config, print)
        open_data(data.config)
        spent.append(time.process_time() - started)
    assert min(spent) < 0.5
