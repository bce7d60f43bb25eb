"""Which sample comes when (ORDER-1 to ORDER-5, EVAL-2)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from src.config import Config
from src.trainer.data.order import Order, Permutation, heldout_order, slots
from tests.data.small import small_config


def config(**changes: Any) -> Config:
    return small_config(Path("nowhere"), Path("nowhere"), **changes)


def samples(order: Order, positions: range) -> list[int]:
    return [order.at(p).sample for p in positions]


@pytest.mark.parametrize("size", [*range(1, 40), 97, 1000, 4096, 4097])
def test_a_permutation_is_a_bijection(size: int) -> None:
    """ORDER-1."""
    permutation = Permutation(b"key", size)
    assert sorted(permutation(i) for i in range(size)) == list(range(size))


def test_a_permutation_is_pinned() -> None:
    """The same on every platform; a changed cipher would change every run's data silently."""
    assert [Permutation(b"key", 10)(i) for i in range(10)] == [3, 1, 6, 4, 2, 8, 9, 7, 5, 0]
    assert [Permutation(b"key", 10**12)(i) for i in (0, 1, 999_999_999_999)] == [
        95729966063,
        548777260901,
        492340888678,
    ]


def test_permutations_look_random() -> None:
    """Every place is about equally likely for every index, also in a set of 3; neighbours part."""
    for size in (3, 7, 60):
        counts = [[0] * size for _ in range(size)]
        for key in range(3000):
            permutation = Permutation(str(key).encode(), size)
            for i in range(min(size, 7)):
                counts[i][permutation(i)] += 1
        expected = 3000 / size
        for row in counts[: min(size, 7)]:
            chi2 = sum((c - expected) ** 2 / expected for c in row)
            assert chi2 < size + 5 * (2 * size) ** 0.5
    permutation = Permutation(b"k", 10_000)
    close = sum(abs(permutation(i) - permutation(i + 1)) < 100 for i in range(2000))
    assert close < 120


def test_epochs_are_full_and_differ() -> None:
    """ORDER-1, ORDER-5 `carry`: a batch may straddle two epochs."""
    order = Order(config(global_batch_size=7), 45)
    epochs = [samples(order, range(e * 45, (e + 1) * 45)) for e in range(4)]
    assert all(sorted(epoch) == list(range(45)) for epoch in epochs)
    assert all(a != b for a, b in itertools.combinations(epochs, 2))
    assert [order.at(p).epoch for p in (0, 44, 45, 89, 90)] == [0, 0, 1, 1, 2]
    assert len({tuple(samples(order, range(e * 45, e * 45 + 9))) for e in range(100)}) == 100


def test_drop_cuts_each_epoch_in_permuted_order() -> None:
    """ORDER-5 `drop`: N is cut to a multiple of B; other samples are left out in each epoch."""
    made = config(global_batch_size=7, data__epoch_tail="drop")
    dropped, carried = Order(made, 45), Order(config(global_batch_size=7), 45)
    for epoch in range(5):
        found = samples(dropped, range(epoch * 42, (epoch + 1) * 42))
        assert found == samples(carried, range(epoch * 45, epoch * 45 + 42))
        assert {dropped.at(p).epoch for p in range(epoch * 42, (epoch + 1) * 42)} == {epoch}
    left_out = [set(range(45)) - set(samples(dropped, range(e * 42, (e + 1) * 42))) for e in range(5)]
    assert len({frozenset(s) for s in left_out}) > 1


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"seed": 1}, False),
        ({"data__shuffle_seed": 1}, False),
        ({"data__shuffle_seed": 0}, True),
        ({"seed": 1, "data__shuffle_seed": 0}, True),
        ({"data__split_seed": 1}, True),
        ({"tokenizer__seed": 1}, True),
        ({"max_steps": 10_000}, True),
        ({"mesh__dp": 4}, True),
    ],
)
def test_what_drives_the_order(changes: dict[str, Any], is_same: bool) -> None:
    """SEED's column of the sample order; `max_steps` changes no earlier batch (ORDER-2)."""
    before, after = (samples(Order(c, 200), range(150, 350)) for c in (config(), config(**changes)))
    assert (before == after) == is_same


def test_a_late_position_costs_no_more() -> None:
    """ORDER-2: position 10¹⁵ of a set of 10¹⁰ at once, without a table."""
    order = Order(config(), 10**10)
    assert order.at(10**15 + 3).epoch == 100_000
    assert len(set(samples(order, range(10**15, 10**15 + 1000)))) == 1000


@pytest.mark.parametrize(
    ("batch", "size", "coordinates"), [(12, 2, 1), (12, 2, 3), (12, 1, 4), (12, 3, 2), (24, 2, 4)]
)
def test_slots_of_all_coordinates_are_the_batch(batch: int, size: int, coordinates: int) -> None:
    """ORDER-3, ORDER-4: each slot on exactly one of any number of coordinates; the formula word by word."""
    taken = []
    for d in range(coordinates):
        for m in range(batch // (size * coordinates)):
            found = list(slots(m, d, coordinates, size))
            assert found == [(m * coordinates + d) * size + i for i in range(size)]
            taken += found
    assert sorted(taken) == list(range(batch))


def test_held_out_samples_are_a_prefix_of_one_order() -> None:
    """EVAL-2: the same samples for every seed; fewer are a prefix of more; each once."""
    whole = heldout_order(config(evaluation__samples=None), 31)
    assert sorted(whole) == list(range(31))
    assert heldout_order(config(evaluation__samples=None, seed=9, data__shuffle_seed=3), 31) == whole
    assert heldout_order(config(evaluation__samples=8), 31) == whole[:8]
    assert heldout_order(config(evaluation__samples=99), 31) == whole
    assert heldout_order(config(evaluation__samples=None, data__split_seed=1), 31) != whole
    assert whole != list(range(31))
