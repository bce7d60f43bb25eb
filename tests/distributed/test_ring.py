"""Attention over the positions of several ranks, without a model (ENG-21, ENG-22)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from src.trainer.parallel.context import Ring
from src.trainer.parallel.inputs import own_part, whole_labels, whole_tokens
from src.trainer.parallel.spans import hop, spans
from tests.distributed import world
from tests.distributed.batches import micro_batch, samples
from tests.distributed.ring import CASES, MUTATIONS, mutants, worst_errors

VALUES, GRADIENTS = 1e-12, 1e-11


@pytest.mark.parametrize("cp", [1, 2, 3, 8])
def test_spans_and_hops_cover_all_pairs(cp: int) -> None:
    """ENG-21: each position on one rank; each pair of a query and a key before it in one hop of one rank.

    After its own pair every rank has two blocks of queries times one of keys, or one times two, in each hop.
    """
    block, length = 3, 6 * cp
    held = {rank: [i for span in spans(length, cp, rank) for i in span] for rank in range(cp)}
    assert sorted(i for places in held.values() for i in places) == list(range(length))
    pairs: list[tuple[int, int]] = []
    for rank in range(cp):
        for step in range(cp):
            here = hop(step, cp, rank, block)
            assert here.source == (rank - step) % cp
            met = [(q, k) for q in held[rank][here.queries] for k in held[here.source][here.keys]]
            assert len(met) == (4 if step == 0 else 2) * block * block
            seen = [(q, k) for q, k in met if k <= q]
            assert step == 0 or len(seen) == len(met)
            assert here.nearest == (0 if step == 0 else min(q - k for q, k in met))
            pairs += seen
    assert len(set(pairs)) == len(pairs) == length * (length + 1) // 2


def test_one_permutation_cuts_everything() -> None:
    """PACK-5, PACK-7: put back in place, the parts are the micro-batch; counts are those of whole samples."""
    whole = micro_batch(samples("packed12", 0)[2:5])
    parts = [own_part(whole, cast(Ring, SimpleNamespace(size=2, rank=rank))) for rank in range(2)]
    places = [i for rank in range(2) for span in spans(12, 2, rank) for i in span]
    back = torch.tensor(places).argsort()
    for name in ("ids_BS", "labels_BS", "positions_BS", "documents_BS", "real_BS"):
        joined = torch.cat([getattr(part, name) for part in parts], 1)[:, back]
        assert torch.equal(joined, getattr(whole, name)), name
    for part in parts:
        assert part.cu_seqlens is None
        assert whole_labels(part).tolist() == (whole.labels_BS != -100).sum(1).tolist()
        assert whole_tokens(part).tolist() == [7, 12, 12]


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_ring_equals_one_softmax(ranks: int) -> None:
    """ENG-21, ENG-22, ATT-5, ATT-6: values and all gradients; GQA, MLA, sinks, windows, documents.

    Every rank sends as often, windows that reach no further than a block included (ENG-20): keys and values
    not home again, gradients all the way.
    """
    for found in world.run(ranks, worst_errors, CASES):
        for case, (value, gradient, sends) in zip(CASES, found, strict=True):
            assert sends == 2 * (ranks - 1) + ranks
            assert value < VALUES, (case, value)
            assert gradient < GRADIENTS, (case, gradient)


def test_faults_of_the_ring_are_noticed() -> None:
    """T-5: under each fault the same comparison is off by more than a hundred limits."""
    found = world.run(2, mutants)[0]
    assert set(found) == set(MUTATIONS)
    assert [name for name, distance in found.items() if distance < 100 * GRADIENTS] == []
