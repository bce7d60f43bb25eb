"""Tokens as a function of (`data.split_seed`, index): no file, no tokenizer, no store (PREP-4).

Two rules are probes of learning; labels that nothing could predict are no targets.

`copy`: the second half of a sample repeats its first half of uniform tokens. Only attention to half a
sample back tells the next token; without it the loss stays at ln V.

`rules`: value, key, value, key, …: each value is its key's permutation of the value before it. Every key
permutes all V values, so neither key nor value alone says anything, and the table has V² random entries
(4,096 at V = 64). A feed-forward path that keeps the keys apart as linear maps needs about V units a key; a
shared path narrower than V has to share units between all keys, routed experts give each key its own. One
key makes up half of all keys: with uniform ones, attention to the token before gets next to no gradient
until the table is known, and the table none until attention is there. That key breaks the deadlock and
leaves (ln V)/2 = 2.08 nats to the table.
"""

from __future__ import annotations

import numpy as np

from src.config import Config
from src.seeds import generator
from src.trainer.data.tokenizer import Ids
from src.trainer.data.tokens import Mask

ZIPF_EXPONENT = 1.2
"""Exponent of the token frequencies under `zipf`; natural text has about 1."""

REPEATED = 7
"""Tokens of the pattern that `repeat` goes through."""

FREQUENT_KEY_SHARE = 0.5
"""Share of key 0 among the keys of `rules`; the others are uniform."""

PACKED_RULES = ("zipf", "repeat")
"""Rules whose documents are of many lengths."""

HELDOUT_SHARE = 8
"""There is one held-out document to this many training ones."""


class SyntheticSource:
    """The documents of one side.

    `uniform`, `copy` and `rules` make documents of `sequence_length` tokens, so samples are dense; `zipf` and
    `repeat` make them of a quarter to twice that, so samples are packed and documents are cut. With
    `data.document_length` L the lengths are uniform from 2 to 2·L - 2, whose mean is L.
    """

    def __init__(self, config: Config, side: str) -> None:
        self._config = config
        self._side = side
        self.name = f"synthetic {config.data.rule}, {side}"
        self._ids = config.data.ids
        self._table = rule_table(config) if config.data.rule == "rules" else None
        self.lengths = self._draw_lengths()

    def read(self, document: int, start: int, length: int) -> Ids:
        """`length` ids of a document from `start` on, int64."""
        random = generator(self._config, "split", "synthetic", self._side, document)
        ids = getattr(self, f"_{self._config.data.rule}")(random, int(self.lengths[document]))
        piece: Ids = ids[start : start + length]
        return piece

    def targets(self, document: int, start: int, length: int) -> Mask | None:
        """Where a token follows from those before it [length]; None where nothing does or all may."""
        place = np.arange(start, start + length)
        if self._config.data.rule == "copy":
            half: Mask = place >= int(self.lengths[document]) // 2
            return half
        if self._config.data.rule == "rules":
            values: Mask = place % 2 == 0
            return values
        return None

    def neighbours(self) -> tuple[Ids, Ids]:
        """Each target with the token before it, over all documents [pairs] each."""
        before, after = [], []
        for document, length in enumerate(self.lengths.tolist()):
            ids, mask = self.read(document, 0, length), self.targets(document, 0, length)
            is_target = np.ones(length - 1, bool) if mask is None else mask[1:]
            before.append(ids[:-1][is_target])
            after.append(ids[1:][is_target])
        return np.concatenate(before), np.concatenate(after)

    def _draw_lengths(self) -> Ids:
        data, positions = self._config.data, self._config.sequence_length
        count = data.documents if self._side == "train" else -(-data.documents // HELDOUT_SHARE)
        if not _varies(self._config):
            return np.full(count, positions, np.int64)
        random = generator(self._config, "split", "lengths", self._side)
        if data.document_length is not None:
            return random.integers(2, 2 * data.document_length - 1, count)
        return random.integers(max(2, positions // 4), 2 * positions, count)

    def _uniform(self, random: np.random.Generator, length: int) -> Ids:
        return random.integers(0, self._ids, length)

    def _repeat(self, random: np.random.Generator, length: int) -> Ids:
        return np.resize(random.integers(0, self._ids, REPEATED), length)

    def _zipf(self, random: np.random.Generator, length: int) -> Ids:
        weights = np.arange(1, self._ids + 1) ** -ZIPF_EXPONENT
        return random.choice(self._ids, length, p=weights / weights.sum())

    def _copy(self, random: np.random.Generator, length: int) -> Ids:
        half = length // 2
        return np.resize(random.integers(0, self._ids, half), length)

    def _rules(self, random: np.random.Generator, length: int) -> Ids:
        assert self._table is not None
        ids = np.empty(length, np.int64)
        keys = random.integers(1, self._ids, length // 2)
        ids[1::2] = np.where(random.random(length // 2) < FREQUENT_KEY_SHARE, 0, keys)
        ids[0] = random.integers(0, self._ids)
        for place in range(2, length, 2):
            ids[place] = self._table[ids[place - 1], ids[place - 2]]
        return ids


def is_dense(config: Config) -> bool:
    """Whether every sample of a run is one full document, so that attention need not tell documents apart.

    Only such a run may take kernels that cannot. A held-out side may end in samples of pads, which are none.
    """
    synthetic = config.data.kind == "synthetic" and not _varies(config)
    return synthetic and config.evaluation.name == "none"


def _varies(config: Config) -> bool:
    """Whether synthetic documents have many lengths."""
    return config.data.rule in PACKED_RULES or config.data.document_length is not None


def rule_table(config: Config) -> Ids:
    """The permutation of each key [keys V, values V], from `data.split_seed` alone."""
    random = generator(config, "split", "rules")
    return random.permuted(np.tile(np.arange(config.data.ids), (config.data.ids, 1)), axis=1)
