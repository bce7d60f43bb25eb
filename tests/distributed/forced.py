"""`balance.force` written again, token by token in plain integers, for the oracle of law 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from src.config import Config
from src.seeds import generator, key_bytes
from src.trainer.data.batch import MicroBatch

WORD = 2**64


def choices(config: Config, m: MicroBatch) -> Callable[[int], Tensor | None]:
    """Layer → the experts of the tokens of a micro-batch that holds whole samples."""
    if config.balance.force == "none":
        return lambda layer: None
    samples, length = m.ids_BS.shape
    numbers = [(m.first + b) * length + s for b in range(samples) for s in range(length)]
    return lambda layer: torch.tensor([experts_of(config, layer, t) for t in numbers], dtype=torch.int32)


def experts_of(config: Config, layer: int, token: int) -> list[int]:
    """The experts of one token."""
    model: Any = config.model
    experts, top_k, kind = model.num_experts, model.top_k, config.balance.force
    if kind == "even":
        return [(token * top_k + j) % experts for j in range(top_k)]
    key = int.from_bytes(key_bytes(config, "balance", "tokens", layer)[:8], "little")
    bits = [splitmix64(key + (token * experts + e) * 0x9E3779B97F4A7C15) for e in range(experts)]
    if kind == "uniform":
        signed = [b - WORD if b >= WORD // 2 else b for b in bits]
        return sorted(range(experts), key=lambda e: -signed[e])[:top_k]
    popularity = generator(config, "balance", "popularity", layer).dirichlet([0.5] * experts)
    arrival = [
        -math.log(((b >> 11) + 0.5) / 2**53) / max(p, 1e-9) for b, p in zip(bits, popularity, strict=True)
    ]
    return sorted(range(experts), key=arrival.__getitem__)[:top_k]


def splitmix64(x: int) -> int:
    """The finalizer, on unsigned words."""
    x %= WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)
