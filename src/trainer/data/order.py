"""Which sample comes when: a keyed bijection per epoch, and the slots of each data rank (ORDER-1 to 5)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import isqrt

from src.config import Config
from src.seeds import key_bytes

ROUNDS = 8
"""Rounds of the Feistel network: their 64-bit keys are one sha512; small sets need more than the usual 4."""

_WORD = 2**64 - 1


class Permutation:
    """A bijection of range(size) in O(1) memory and time per index.

    A Feistel network with modular sums over a grid of about sqrt(size) x sqrt(size) cells; a cell outside the
    set is encrypted again until it falls inside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
    2002: generalized Feistel and cycle walking). Integers only, so it is the same on every platform.
    """

    def __init__(self, key: bytes, size: int) -> None:
        assert size >= 1
        self._size = size
        self._rows = isqrt(size - 1) + 1
        self._columns = -(-size // self._rows)
        digest = hashlib.sha512(key).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "big") for i in range(ROUNDS)]

    def __call__(self, index: int) -> int:
        """Where `index` goes."""
        assert 0 <= index < self._size
        while True:
            index = self._encrypt(index)
            if index < self._size:
                return index

    def _encrypt(self, index: int) -> int:
        row, column = divmod(index, self._columns)
        for i in range(0, ROUNDS, 2):
            row = (row + _mix(column, self._keys[i])) % self._rows
            column = (column + _mix(row, self._keys[i + 1])) % self._columns
        return row * self._columns + column


@dataclass(frozen=True)
class Place:
    """A sample as training meets it."""

    epoch: int
    sample: int
    """Index in the packing plan."""


class Order:
    """The endless sequence of samples of a training set of `size`; a function of the position alone."""

    def __init__(self, config: Config, size: int) -> None:
        tail = size % config.global_batch_size if config.data.epoch_tail == "drop" else 0
        self._config = config
        self._size = size
        self._epoch_length = size - tail

    def at(self, position: int) -> Place:
        """The sample at a position of training, counted from its start over all epochs."""
        epoch, index = divmod(position, self._epoch_length)
        permutation = Permutation(key_bytes(self._config, "order", epoch), self._size)
        return Place(epoch, permutation(index))


def slots(micro_batch: int, coordinate: int, coordinates: int, size: int) -> range:
    """Slots of the global batch for micro-batch m of data coordinate d: (m·D + d)·b … + b (ORDER-3)."""
    first = (micro_batch * coordinates + coordinate) * size
    return range(first, first + size)


def heldout_order(config: Config, size: int) -> list[int]:
    """The held-out samples that are evaluated, in a fixed order keyed by `data.split_seed` alone (EVAL-2)."""
    permutation = Permutation(key_bytes(config, "split", "heldout"), size)
    wanted = config.evaluation.samples
    return [permutation(i) for i in range(size if wanted is None else min(wanted, size))]


def _mix(value: int, key: int) -> int:
    """A well-mixed 64-bit function of a value and a key (the finalizer of splitmix64, Steele et al. 2014)."""
    mixed = (value + key) & _WORD
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
    return mixed ^ (mixed >> 31)
