"""Sizes of the layers whose operations are timed, and how their tokens choose experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from src.bench.place import Place
from src.kernels.declaration import Need
from src.models.build import needs
from src.models.schema import DeepseekV2Config, GptOssConfig, MoeConfig, Qwen3MoeConfig

LOADS = ("balanced", "skewed")
"""Experts in turn, or drawn by a popularity that is Dirichlet(0.5)."""

CONFIGS: dict[str, type[MoeConfig]] = {
    "deepseek_v2": DeepseekV2Config,
    "qwen3_moe": Qwen3MoeConfig,
    "gpt_oss": GptOssConfig,
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a mixture's layer; without shared experts, which are dense."""

    family: str
    experts: int
    top_k: int
    expert_size: int
    width: int = 2048
    tokens: int = 16384

    @property
    def rows(self) -> int:
        """Routed ones."""
        return self.tokens * self.top_k

    @property
    def flops(self) -> int:
        """Forward products: gate and up, then down."""
        return 2 * self.rows * 3 * self.expert_size * self.width

    @property
    def config(self) -> MoeConfig:
        """As a model's, with what routes and activates from the family's defaults."""
        sizes: dict[str, Any] = {"hidden_size": self.width, "num_experts": self.experts, "top_k": self.top_k}
        if self.family == "deepseek_v2":
            sizes["num_shared_experts"] = 0
        return CONFIGS[self.family](family=self.family, expert_size=self.expert_size, **sizes)

    @property
    def needs(self) -> dict[str, Need]:
        """What the registry is asked for."""
        return needs(self.config)


SHAPES = {
    "deepseek_v2": Shape("deepseek_v2", 64, 6, 1408),
    "qwen3": Shape("qwen3_moe", 128, 8, 768),
    "gpt_oss": Shape("gpt_oss", 32, 4, 2880, width=2880),
    "tiny": Shape("qwen3_moe", 5, 2, 16, width=24, tokens=38),
    "tiny_biased": Shape("gpt_oss", 6, 3, 8, width=16, tokens=21),
}


def popularity(experts: int, load: str, device: torch.device) -> Tensor | None:
    """Share of each expert, or None where they take turns.

    Squares of normal numbers are Gamma(1/2) but for a factor, so their shares are Dirichlet(1/2); the same
    whenever they are drawn.
    """
    if load == "balanced":
        return None
    squares_E = torch.empty(experts).normal_(generator=torch.Generator().manual_seed(5)).square()
    return (squares_E / squares_E.sum()).clamp(min=1e-9).to(device)


def choose(shape: Shape, popularity_E: Tensor | None, where: Place) -> Tensor:
    """int32 ids [T,K], K distinct ones a token: the first arrivals of exponential clocks."""
    if popularity_E is None:
        slots_N = torch.arange(shape.rows, device=where.device)
        return (slots_N % shape.experts).int().view(shape.tokens, shape.top_k)
    clocks_TE = torch.empty(shape.tokens, shape.experts, device=where.device)
    clocks_TE.exponential_(generator=where.draws)
    return (clocks_TE / popularity_E).topk(shape.top_k, largest=False).indices.int()
