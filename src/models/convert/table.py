"""Families that transformers has too: config, names and limits of its model, without importing it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from src.errors import Problem
from src.models.convert import deepseek_v2, dense, qwen3_moe
from src.models.convert.stacks import hf_parameter


@dataclass(frozen=True)
class Conversion:
    """How a family stands in transformers. Typed loosely: each function takes its family's config class."""

    config: Callable[..., dict[str, Any]]
    """Our config → the content of `config.json`."""
    parameter: Callable[[str], str]
    """Name of a parameter of our model → of the same tensor in transformers' model."""
    problems: Callable[..., list[Problem]]
    """Our config → what transformers' model cannot be."""
    router: str | None
    """Module within a decoder layer that returns router logits, weights and expert ids; None without any."""


CONVERSIONS: dict[str, Conversion] = {
    "deepseek_v2": Conversion(
        config=deepseek_v2.hf_config,
        parameter=hf_parameter,
        problems=deepseek_v2.hf_problems,
        router=deepseek_v2.ROUTER,
    ),
    "qwen3_moe": Conversion(
        config=qwen3_moe.hf_config,
        parameter=hf_parameter,
        problems=qwen3_moe.hf_problems,
        router=qwen3_moe.ROUTER,
    ),
    "dense": Conversion(
        config=dense.hf_config,
        parameter=hf_parameter,
        problems=dense.hf_problems,
        router=None,
    ),
}
"""Family → its conversion."""
