"""Packing plans (PACK-1 to PACK-3) and samples as tensors (PACK-3 to PACK-6)."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from src.trainer.data.batch import MicroBatch, StepBatch
from src.trainer.data.corpus import open_data
from src.trainer.data.pack import Plan, cut, make_plan
from src.trainer.data.packed import FILLER, NO_TARGET, Packed
from tests.data.small import prepared, small_config

PACKINGS = ("best_fit", "contiguous", "none")


class Memory:
    """Documents in memory."""

    name = "memory"

    def __init__(self, documents: list[list[int]]) -> None:
        self.documents = [np.array(d, np.int64) for d in documents]
        self.lengths = np.array([len(d) for d in documents], np.int64)

    def read(self, document: int, start: int, length: int) -> np.ndarray:
        assert start + length <= len(self.documents[document])
        return self.documents[document][start : start + length]

    def targets(self, document: int, start: int, length: int) -> None:
        return None


def pack(documents: list[list[int]], positions: int, packing: str) -> Packed:
    source = Memory(documents)
    return Packed(source, make_plan(source.lengths, positions, packing), positions)


def numbered(lengths: list[int]) -> list[list[int]]:
    """Documents without a repeated id, so that a pair of ids says where it is from."""
    ends = np.cumsum([0, *lengths])
    return [list(range(a + 1, b + 1)) for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]


def slow_best_fit(lengths: list[int], positions: int) -> list[list[tuple[int, int, int]]]:
    """PACK-2 word by word: every bin is looked at."""
    pieces = []
    for document, n in enumerate(lengths):
        offset = 0
        while n - offset >= 2:
            pieces.append((document, offset, min(positions, n - offset)))
            offset += positions - 1
    pieces.sort(key=lambda p: (-p[2], p[0], p[1]))
    bins: list[list[tuple[int, int, int]]] = []
    for piece in pieces:
        used = [sum(p[2] for p in b) for b in bins]
        fits = [i for i, u in enumerate(used) if u + piece[2] <= positions]
        if fits:
            bins[max(fits, key=lambda i: (used[i], -i))].append(piece)
        else:
            bins.append([piece])
    return bins


lengths_and_positions = st.tuples(st.lists(st.integers(1, 70), max_size=25), st.integers(2, 17))


@settings(max_examples=150, deadline=None)
@given(case=lengths_and_positions)
def test_best_fit_is_the_rule(case: tuple[list[int], int]) -> None:
    """PACK-2 against the reference, piece by piece and bin by bin."""
    lengths, positions = case
    plan = make_plan(np.array(lengths, np.int64), positions, "best_fit")
    assert [[tuple(p) for p in plan.sample(i).tolist()] for i in range(len(plan))] == slow_best_fit(
        lengths, positions
    )


@settings(max_examples=150, deadline=None)
@given(case=lengths_and_positions, packing=st.sampled_from(PACKINGS))
def test_every_pair_of_a_document_is_a_target_once(case: tuple[list[int], int], packing: str) -> None:
    """PACK-1, PACK-3 to PACK-6 of all samples: 1-token documents, exact fits, documents of many samples."""
    lengths, positions = case
    documents = numbered(lengths)
    packed = pack(documents, positions, packing)
    pairs = []
    for sample in range(len(packed)):
        row = packed.micro_batch([sample])
        check_structure(row, positions)
        ids, labels = row.ids_BS[0].tolist(), row.labels_BS[0].tolist()
        pairs += [(a, b) for a, b in zip(ids, labels, strict=True) if b != NO_TARGET]
        assert row.target_tokens == sum(label != NO_TARGET for label in labels) > 0
    expected = [pair for d in documents for pair in itertools.pairwise(d)]
    assert sorted(pairs) == sorted(expected)
    assert packed.plan.tokens == sum(packed.plan.sample(i)[:, 2].sum() for i in range(len(packed)))


def check_structure(row: MicroBatch, positions: int) -> None:
    """What holds for every micro-batch."""
    rows = len(row.samples)
    real = torch.ones(rows, positions, dtype=torch.bool) if row.real_BS is None else row.real_BS
    if row.cu_seqlens is None:
        assert row.documents_BS is None
        assert row.real_BS is None
        assert torch.equal(row.positions_BS, torch.arange(positions).expand(rows, -1))
        assert (row.labels_BS[:, -1] == NO_TARGET).all()
        assert torch.equal(row.labels_BS[:, :-1], row.ids_BS[:, 1:])
        return
    starts = row.cu_seqlens
    assert row.documents_BS is not None
    assert (starts.dtype, row.documents_BS.dtype) == (torch.int32, torch.int32)
    assert (int(starts[0]), int(starts[-1])) == (0, rows * positions)
    assert (starts.diff() > 0).all()
    assert set(range(0, rows * positions, positions)) <= set(starts.tolist())
    flat = [t.flatten() for t in (row.ids_BS, row.labels_BS, row.positions_BS, row.documents_BS, real)]
    for segment, (a, b) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        ids, labels, place, document, is_real = (t[a:b] for t in flat)
        assert torch.equal(place, torch.arange(b - a))
        assert (document == segment).all()
        assert is_real.all() or not is_real.any()
        if is_real.all():
            assert b - a >= 2
            assert int(labels[-1]) == NO_TARGET
            assert torch.equal(labels[:-1], ids[1:])
        else:
            assert b % positions == 0, "pads are the last segment of their sample"
            assert (labels == NO_TARGET).all()
            assert (ids == 0).all()


def test_pieces_overlap_by_one_and_single_tokens_are_left_out() -> None:
    pieces = cut(np.array([1, 5, 2, 9, 0, 6], np.int64), 5)
    assert pieces.tolist() == [[1, 0, 5], [2, 0, 2], [3, 0, 5], [3, 4, 5], [5, 0, 5], [5, 4, 2]]


def test_offsets_beyond_32_bits() -> None:
    """A document of 2³³ + 7 tokens, in samples of 2³²."""
    pieces = cut(np.array([2**33 + 7, 3], np.int64), 2**32)
    assert pieces.tolist() == [
        [0, 0, 2**32],
        [0, 2**32 - 1, 2**32],
        [0, 2**33 - 2, 9],
        [1, 0, 3],
    ]


def test_no_documents_give_no_samples() -> None:
    for packing in PACKINGS:
        for lengths in ([], [1, 1]):
            assert len(make_plan(np.array(lengths, np.int64), 8, packing)) == 0


def test_contiguous_follows_the_stream() -> None:
    packed = pack(numbered([3, 4, 1, 2]), 5, "contiguous")
    rows = [packed.micro_batch([i]).ids_BS[0].tolist() for i in range(len(packed))]
    assert rows == [[1, 2, 3, 4, 5], [5, 6, 7, 9, 10]]


def test_none_keeps_a_document_to_itself() -> None:
    packed = pack(numbered([3, 7, 2]), 5, "none")
    rows = [packed.micro_batch([i]).ids_BS[0].tolist() for i in range(len(packed))]
    assert rows == [[1, 2, 3, 0, 0], [4, 5, 6, 7, 8], [8, 9, 10, 0, 0], [11, 12, 0, 0, 0]]


def test_a_micro_batch_is_dense_only_if_all_its_samples_are() -> None:
    """PACK-6: full documents alone take the dense path."""
    packed = pack(numbered([5, 5, 4, 5]), 5, "none")
    dense, mixed = packed.micro_batch([0, 1]), packed.micro_batch([0, 2, 3])
    check_structure(dense, 5)
    check_structure(mixed, 5)
    assert dense.cu_seqlens is None
    assert mixed.cu_seqlens is not None
    assert mixed.cu_seqlens.tolist() == [0, 5, 9, 10, 15]
    assert mixed.real_BS is not None
    assert mixed.real_BS.sum() == 14
    packed = pack(numbered([3, 2, 5]), 5, "best_fit")
    full = packed.micro_batch([1])
    assert full.cu_seqlens is not None
    assert full.real_BS is None


def test_pads_count_nowhere() -> None:
    """PACK-4: one last segment that counts neither as target nor as token, in any sample length."""
    documents = numbered([5, 3])
    for positions in (5, 8, 11):
        packed = pack(documents, positions, "none")
        step = StepBatch(tuple(packed.micro_batch([i]) for i in range(2)), epoch=0)
        assert (step.tokens, step.target_tokens) == (8, 6)
        for micro_batch, length in zip(step.micro_batches, (5, 3), strict=True):
            if positions > length:
                assert micro_batch.cu_seqlens is not None
                assert micro_batch.cu_seqlens.tolist() == [0, length, positions]
                assert micro_batch.real_BS is not None
                assert micro_batch.real_BS.sum() == length


def test_a_filler_is_all_pads() -> None:
    """EVAL-1, EVAL-4: no target, one segment, not real."""
    packed = pack(numbered([5, 5]), 5, "none")
    row = packed.micro_batch([1, FILLER])
    check_structure(row, 5)
    assert row.samples == (1, -1)
    assert row.target_tokens == 4
    assert row.real_BS is not None
    assert row.real_BS.tolist() == [[True] * 5, [False] * 5]


def test_the_neighbour_document_changes_nothing() -> None:
    """PACK-5: another neighbour of the same length leaves every tensor of this document as it was."""
    documents = numbered([4, 3])
    one = pack(documents, 7, "best_fit").micro_batch([0])
    two = pack([documents[0], [90, 91, 92]], 7, "best_fit").micro_batch([0])
    for name in ("ids_BS", "labels_BS", "positions_BS", "documents_BS"):
        assert torch.equal(getattr(one, name)[:, :4], getattr(two, name)[:, :4])
    assert not torch.equal(one.labels_BS, two.labels_BS)


def test_a_sample_that_cannot_be_read_is_named() -> None:
    """LOAD-2."""
    packed = pack(numbered([4, 9]), 5, "best_fit")
    packed.source.documents[1] = np.zeros(0, np.int64)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"memory: sample 1, document 1, tokens 4 to 9"):
        packed.micro_batch([1])


@pytest.mark.parametrize("packing", PACKINGS)
def test_stored_plans_are_the_computed_ones(tmp_path: Path, packing: str) -> None:
    """PACK-2: plans are artifacts; seed and batch make no other."""
    config = small_config(tmp_path, data__packing=packing)
    prepared(config)
    prepared(small_config(tmp_path, data__packing=packing, seed=5, global_batch_size=2))
    assert len(list((tmp_path / "store" / "packs").glob("*/manifest.json"))) == 1
    data = open_data(config)
    for packed in (data.train, data.heldout):
        plan = make_plan(packed.source.lengths, 24, packing)
        np.testing.assert_array_equal(packed.plan.pieces, plan.pieces)
        np.testing.assert_array_equal(packed.plan.starts, plan.starts)
    assert isinstance(data.train.plan, Plan)
