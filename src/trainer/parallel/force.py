"""Experts that no router chose, for benchmarks (`balance.force`); the routing weights stay the router's.

A choice is a function of the seed, the layer and the token's number in the whole training, so it is the same
on every mesh and after a resume, and nothing is stored for it (DET-4, CKPT-8). `even` deals the experts
out in turn. `uniform` makes every set of K as likely as any other. `dirichlet` draws the popularity of a
layer's experts once, from Dirichlet(0.5), then K distinct ones for each token. Evaluation routes as learned.
Letters: T tokens, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from src.config import Config
from src.models.schema import MoeConfig
from src.seeds import generator, key_bytes
from src.trainer.data.batch import MicroBatch
from src.trainer.parallel.context import Ring
from src.trainer.parallel.spans import spans

CONCENTRATION = 0.5
"""Of the Dirichlet distribution: a few experts get most tokens, as in models that nobody balanced."""
RAREST = 1e-9
"""Least popularity, so that K distinct experts can always be drawn."""
GAMMA, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""Multipliers of splitmix64 as signed numbers (Steele et al. 2014): step and both rounds of its finalizer."""


class Force:
    """The forced choices of one run."""

    def __init__(self, config: Config, layers: Sequence[int], device: torch.device) -> None:
        """`layers` are the global numbers of those with experts."""
        assert isinstance(config.model, MoeConfig), config.model.family
        self._kind = config.balance.force
        self._experts, self._top_k = config.model.num_experts, config.model.top_k
        self._keys = {
            layer: int.from_bytes(key_bytes(config, "balance", "tokens", layer)[:8], "little", signed=True)
            for layer in layers
        }
        self._popularity = {}
        if self._kind == "dirichlet":
            self._popularity = {layer: self._drawn(config, layer).to(device) for layer in layers}

    def ids(self, layer: int, tokens_T: Tensor) -> Tensor:
        """int32 experts [T,K] of the tokens with these int64 numbers, K distinct ones each; no host sync."""
        if self._kind == "even":
            places_K = torch.arange(self._top_k, device=tokens_T.device)
            return ((tokens_T[:, None] * self._top_k + places_K) % self._experts).int()
        bits_TE = self._bits(layer, tokens_T)
        if self._kind == "uniform":
            return bits_TE.topk(self._top_k).indices.int()
        # The first K arrivals of independent exponential clocks are a draw without replacement.
        uniform_TE = (((bits_TE >> 11) & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53
        arrival_TE = -uniform_TE.log() / self._popularity[layer]
        return arrival_TE.topk(self._top_k, largest=False).indices.int()

    def _bits(self, layer: int, tokens_T: Tensor) -> Tensor:
        """64 random bits for each token and expert [T,E]: splitmix64 of their number and the layer's key."""
        experts_E = torch.arange(self._experts, device=tokens_T.device)
        x = (tokens_T[:, None] * self._experts + experts_E) * GAMMA + self._keys[layer]
        x = (x ^ _shifted(x, 30)) * FIRST
        x = (x ^ _shifted(x, 27)) * SECOND
        return x ^ _shifted(x, 31)

    def _drawn(self, config: Config, layer: int) -> Tensor:
        random = generator(config, "balance", "popularity", layer)
        drawn = random.dirichlet([CONCENTRATION] * self._experts)
        return torch.from_numpy(drawn).clamp(min=RAREST)


def _shifted(x: Tensor, places: int) -> Tensor:
    """A logical shift to the right; torch's own keeps the sign."""
    return (x >> places) & ((1 << (64 - places)) - 1)


def token_numbers(batch: MicroBatch, ring: Ring | None) -> Tensor:
    """int64 number of each token of this rank's part in the whole training, [T]: sample·length + position."""
    samples, here = batch.ids_BS.shape
    length, device = here * (1 if ring is None else ring.size), batch.ids_BS.device
    parts = (range(length),) if ring is None else spans(length, ring.size, ring.rank)
    places_S = torch.cat([torch.arange(part.start, part.stop, device=device) for part in parts])
    numbers_B = torch.arange(batch.first, batch.first + samples, device=device)
    return (numbers_B[:, None] * length + places_S).flatten()
