"""Synthetic rules (CORPUS-5, PREP-4) and the lines that counts reach (EVAL-5)."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from src.trainer.data.baselines import Baselines, count_lines, measure
from src.trainer.data.corpus import Data, open_data
from src.trainer.data.packed import NO_TARGET
from src.trainer.data.synthetic import FREQUENT_KEY_SHARE, SyntheticSource, is_dense, rule_table
from tests.data.small import prepared, small_config, synthetic_config

RULES = ("uniform", "repeat", "zipf", "copy", "rules")


def rows(data: Data, count: int = 20) -> list[tuple[list[int], list[int]]]:
    batches = (data.train.micro_batch([i]) for i in range(count))
    return [(b.ids_BS[0].tolist(), b.labels_BS[0].tolist()) for b in batches]


@pytest.mark.parametrize("rule", RULES)
def test_tokens_are_a_function_of_split_seed_and_index(rule: str) -> None:
    """Other split seeds, sides and indices give other tokens; nothing else of the run does."""

    def tokens(side: str = "train", index: int = 3, **changes: Any) -> list[int]:
        source = SyntheticSource(synthetic_config(rule, **changes), side)
        return source.read(index, 0, int(source.lengths[index])).tolist()

    assert (
        tokens()
        == tokens(seed=5, data__shuffle_seed=4, global_batch_size=2, data__documents=99)[: len(tokens())]
    )
    others = [tokens(), tokens("heldout"), tokens(index=2), tokens(data__split_seed=1)]
    assert len({tuple(t) for t in others}) == 4
    assert all(0 <= i < 64 for t in others for i in t)
    source = SyntheticSource(synthetic_config(rule), "train")
    assert source.read(3, 5, 7).tolist() == tokens()[5:12]


def test_copy_predicts_its_second_half_alone() -> None:
    """CORPUS-5: exactly the labels that look back half a sample."""
    for ids, labels in rows(open_data(synthetic_config("copy"))):
        assert ids[:32] == ids[32:]
        assert labels == [NO_TARGET] * 31 + ids[32:] + [NO_TARGET]


def test_rules_predict_values_from_key_and_value() -> None:
    """CORPUS-5: labels of keys are no targets; each value is the key's permutation of the value before."""
    data = open_data(synthetic_config("rules"))
    table = rule_table(data.config)
    assert table.shape == (64, 64)
    assert (np.sort(table, axis=1) == np.arange(64)).all()
    keys: Counter[int] = Counter()
    for ids, labels in rows(data, 40):
        for place, label in enumerate(labels):
            if place % 2 == 0:
                assert label == NO_TARGET
            elif place < 63:
                assert label == ids[place + 1] == table[ids[place], ids[place - 1]]
                keys[ids[place]] += 1
    assert abs(keys[0] / keys.total() - FREQUENT_KEY_SHARE) < 0.05
    assert len(keys) > 55
    assert rule_table(synthetic_config("rules", data__split_seed=1)).tolist() != table.tolist()


def test_neither_key_nor_value_alone_tells_the_next_value() -> None:
    """The probe's point: from either alone nothing below the share of the frequent key can be learned."""
    data = open_data(synthetic_config("rules", data__documents=400))
    by_key: dict[int, Counter[int]] = defaultdict(Counter)
    for ids, _ in rows(data, 400):
        for place in range(1, 63, 2):
            by_key[ids[place]][ids[place + 1]] += 1
    frequent = by_key[0]
    assert max(frequent.values()) < 1.5 * frequent.total() / 64


@pytest.mark.parametrize(
    ("rule", "dense"), [("uniform", True), ("rules", True), ("zipf", False), ("repeat", False)]
)
def test_lengths_by_rule(rule: str, dense: bool) -> None:
    data = open_data(synthetic_config(rule))
    lengths = data.train.source.lengths
    assert (lengths == 64).all() == dense
    assert 2 <= lengths.min() <= lengths.max() < 128
    batches = [data.train.micro_batch([i]) for i in range(len(data.train))]
    assert all((b.cu_seqlens is None) == dense for b in batches if b.real_BS is not None or dense)
    assert len(data.heldout.source.lengths) == 5
    more = open_data(synthetic_config(rule, data__documents=41))
    assert len(more.heldout.source.lengths) == 6


def test_documents_of_a_given_mean_length_are_packed() -> None:
    """PACK-1: lengths from 2 to 2·L - 2 whose mean is L; samples are full of them and are not dense."""
    config = synthetic_config("uniform", data__document_length=17, data__documents=3000)
    data = open_data(config)
    lengths = data.train.source.lengths
    assert (lengths.min(), lengths.max()) == (2, 2 * 17 - 2)
    assert lengths.mean() == pytest.approx(17, rel=0.03)
    assert data.train.plan.tokens / (len(data.train) * 64) > 0.99
    config.evaluation.name = "none"
    assert not is_dense(config)
    assert is_dense(replace(config, data=replace(config.data, document_length=None)))


@pytest.mark.parametrize("positions", [3, 4, 17])
@pytest.mark.parametrize("rule", RULES)
def test_every_sample_has_a_target(rule: str, positions: int) -> None:
    """EVAL-4: so that no step is without any."""
    data = open_data(synthetic_config(rule, sequence_length=positions, global_batch_size=2))
    assert all(
        side.micro_batch([i]).target_tokens > 0
        for side in (data.train, data.heldout)
        for i in range(len(side))
    )


def test_repeat_and_zipf_do_what_their_names_say() -> None:
    source = SyntheticSource(synthetic_config("repeat"), "train")
    ids = source.read(0, 0, int(source.lengths[0]))
    assert (ids[7:] == ids[:-7]).all()
    source = SyntheticSource(synthetic_config("zipf"), "train")
    counts = Counter(i for d in range(40) for i in source.read(d, 0, int(source.lengths[d])).tolist())
    assert counts[0] > 2 * counts[3] > 4 * counts[30] > 0


def test_lines_of_synthetic_data() -> None:
    """Uniform tokens: no count is below ln V. `copy`: nor is a pair."""
    for rule in ("uniform", "copy"):
        lines = open_data(synthetic_config(rule, data__documents=300)).baselines
        assert lines.uniform == math.log(64)
        assert lines.frequencies is not None
        assert lines.pairs is not None
        assert lines.frequencies == pytest.approx(math.log(64), abs=0.02)
        assert lines.pairs > lines.frequencies - 0.02
        assert lines.bytes_per_token is None


def slow_lines(train: list[tuple[int, int]], heldout: list[tuple[int, int]], v: int) -> tuple[float, float]:
    """The formulas of EVAL-5's lines with dictionaries."""
    unigrams, pairs = Counter(b for _, b in train), Counter(train)
    contexts = Counter(a for a, _ in train)
    before, after = defaultdict(set), defaultdict(set)
    for a, b in train:
        after[a].add(b)
        before[b].add(a)
    nats = [0.0, 0.0]
    for a, b in heldout:
        fallback = (len(before[b]) + 1) / (len(pairs) + v)
        nats[0] -= math.log((unigrams[b] + 1) / (len(train) + v))
        d = len(after[a])
        nats[1] -= math.log((pairs[a, b] + d * fallback) / (contexts[a] + d) if d else fallback)
    return nats[0] / len(heldout), nats[1] / len(heldout)


def test_lines_are_their_formulas() -> None:
    """EVAL-5, with contexts and tokens that training never saw."""
    random = np.random.default_rng(3)
    train, heldout = (
        (random.integers(0, n, 500) ** 2 % 23, random.integers(0, n, 500) ** 2 % 23) for n in (9, 19)
    )
    expected = slow_lines(*(list(zip(a.tolist(), b.tolist(), strict=True)) for a, b in (train, heldout)), 23)
    assert count_lines(train, heldout, 23) == pytest.approx(expected, rel=1e-12)
    assert sum(
        math.exp(-count_lines(train, (np.array([4]), np.array([t])), 23)[1]) for t in range(23)
    ) == pytest.approx(1)


@pytest.mark.parametrize("is_train_empty", [True, False])
def test_a_side_without_pairs_has_no_lines(is_train_empty: bool) -> None:
    """EVAL-5: nothing to count, or nothing to measure on."""
    some, none = (np.array([1, 2]), np.array([2, 3])), (np.array([], np.int64), np.array([], np.int64))
    train, heldout = (none, some) if is_train_empty else (some, none)
    assert measure(train, heldout, 5, 2.5) == Baselines(math.log(5), None, None, 2.5)


def test_lines_of_a_corpus_count_pairs_within_documents(tmp_path: Path) -> None:
    """EVAL-5: from the training side, stored with the artifact, EOS a target, no pair across documents."""
    config = small_config(tmp_path, data__packing="none")
    prepared(config)
    data = open_data(config)
    pairs = []
    for packed in (data.train, data.heldout):
        documents = [packed.source.read(i, 0, n).tolist() for i, n in enumerate(packed.source.lengths)]
        pairs.append([p for d in documents for p in itertools.pairwise(d)])
    lines = data.baselines
    assert (lines.frequencies, lines.pairs) == pytest.approx(slow_lines(*pairs, 258), rel=1e-12)
    assert lines.uniform == math.log(258)
    assert lines.bytes_per_token == data.manifest["text_bytes"]["heldout"] / len(pairs[1])
    assert data.manifest["baselines"]["pairs"] == lines.pairs


def test_without_held_out_documents_there_are_no_lines(tmp_path: Path) -> None:
    config = small_config(tmp_path, data__holdout=0)
    prepared(config)
    data = open_data(config)
    assert len(data.heldout) == 0
    assert (data.baselines.frequencies, data.baselines.pairs, data.baselines.bytes_per_token) == (
        None,
        None,
        None,
    )
