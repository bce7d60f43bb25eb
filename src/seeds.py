"""Named streams of randomness, and the one place that reads ``config.seed`` (SEED-1).

A stream is keyed by its name, its seed and the place where it is used, never by how often anything was drawn
before. So no draw depends on the mesh, on the order of calls or on a global generator.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from src.config import Config

STREAMS = ("init", "order", "split", "mixture", "balance", "sample", "tokenizer")
"""Every stream there is; a typo in a stream's name is an error, not another stream."""

Where = int | str
"""A part of the place of use: a parameter's name, an epoch, a step, an index."""


def seed_of(config: Config, stream: str) -> int:
    """The seed that drives `stream` (SEED-4)."""
    if stream == "split":
        return config.data.split_seed
    if stream == "tokenizer":
        return config.tokenizer.seed
    if stream in ("order", "mixture") and config.data.shuffle_seed is not None:
        return config.data.shuffle_seed
    assert stream in STREAMS, f"no stream {stream!r}; streams are {STREAMS}"
    return config.seed


def stream_key(stream: str, seed: int, *where: Where) -> bytes:
    """32 bytes that depend on `stream`, `seed` and `where` alone: sha256 of their JSON list."""
    assert stream in STREAMS, f"no stream {stream!r}; streams are {STREAMS}"
    return hashlib.sha256(json.dumps([stream, seed, *where]).encode()).digest()


def key_bytes(config: Config, stream: str, *where: Where) -> bytes:
    """`stream_key` with the seed that `config` gives the stream."""
    return stream_key(stream, seed_of(config, stream), *where)


def generator(config: Config, stream: str, *where: Where) -> np.random.Generator:
    """A fresh numpy generator (Philox 4x64, counter-based) for one place of use.

    Two calls with equal arguments give generators that draw the same numbers.
    """
    return philox(key_bytes(config, stream, *where))


def philox(key: bytes) -> np.random.Generator:
    """The generator of a 32-byte key; Philox takes the first 128 bits."""
    import numpy as np

    return np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
