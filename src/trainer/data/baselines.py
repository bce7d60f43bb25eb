"""What counting alone reaches on the held-out side (EVAL-5): the lines beside a model's loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from src.trainer.data.tokenizer import Ids

COUNTED_TOKENS = 2**24
"""Counts come from at most this many first training tokens: pairs of all of a large corpus fill a memory."""

Neighbours = tuple[Ids, Ids]
"""Context and target ids [n] each."""


@dataclass(frozen=True)
class Baselines:
    """Nats per target token of the held-out side; None without held-out documents."""

    uniform: float
    """ln V."""
    frequencies: float | None
    """Each token by its frequency in training."""
    pairs: float | None
    """Each token by the one before it, interpolated."""
    bytes_per_token: float | None
    """UTF-8 bytes of the held-out texts per target token; None without text."""


def count_lines(train: Neighbours, heldout: Neighbours, vocab_size: int) -> tuple[float, float]:
    """Nats per held-out target of token frequencies and of interpolated pairs, both counted on `train`.

    Frequencies are smoothed by one count per entry. Pairs are interpolated as in Witten and Bell (1991),
    method C: p(t|s) = (c(s,t) + d(s)·q(t)) / (c(s) + d(s)), where d(s) counts the different successors of s,
    and q is Kneser and Ney's (1995): t's share of all different (predecessor, token) pairs, smoothed by one.
    """
    contexts, targets = heldout
    counts_V = np.bincount(train[1], minlength=vocab_size)
    frequency_V = (counts_V + 1) / (counts_V.sum() + vocab_size)
    codes, code_counts = np.unique(train[0] * vocab_size + train[1], return_counts=True)
    predecessors_V = np.bincount(codes % vocab_size, minlength=vocab_size)
    fallback_V = (predecessors_V + 1) / (predecessors_V.sum() + vocab_size)
    successors_V = np.bincount(codes // vocab_size, minlength=vocab_size)
    contexts_V = np.bincount(train[0], minlength=vocab_size)
    wanted = contexts * vocab_size + targets
    at = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
    seen = np.where(codes[at] == wanted, code_counts[at], 0)
    different, total = successors_V[contexts], contexts_V[contexts]
    interpolated = (seen + different * fallback_V[targets]) / np.maximum(total + different, 1)
    pair = np.where(total > 0, interpolated, fallback_V[targets])
    return -float(np.log(frequency_V[targets]).mean()), -float(np.log(pair).mean())


def measure(
    train: Neighbours, heldout: Neighbours, vocab_size: int, bytes_per_token: float | None
) -> Baselines:
    """All lines; `vocab_size` counts true entries, not padding rows."""
    uniform = math.log(vocab_size)
    if not len(train[0]) or not len(heldout[0]):
        return Baselines(uniform, None, None, bytes_per_token)
    return Baselines(uniform, *count_lines(train, heldout, vocab_size), bytes_per_token)
