"""Families that transformers has too: config, names and limits of its model, without importing it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from src.errors import Problem
from src.models.convert import deepseek_v2, dense, gpt_oss, qwen3_moe
from src.models.convert.stacks import hf_entry
from src.models.names import Entry


@dataclass(frozen=True)
class Conversion:
    """How a family stands in transformers. Typed loosely: each function takes its family's config class."""

    config: Callable[..., dict[str, Any]]
    """Our config → the content of `config.json`."""
    entry: Callable[[Entry], Entry]
    """Where our model holds a canonical tensor → where transformers' model does."""
    problems: Callable[..., list[Problem]]
    """Our config → what transformers' model cannot be."""
    router: str | None
    """Module within a decoder layer that returns router logits, weights and expert ids; None without any."""
    chosen: Callable[..., dict[str, Any]] | None = None
    """Our config → keywords of `kernels.route` by which weights follow from the experts that were chosen."""
    attention: str = "sdpa"
    """The implementation that `attn_implementation=auto` takes."""


CONVERSIONS: dict[str, Conversion] = {
    "deepseek_v2": Conversion(
        config=deepseek_v2.hf_config,
        entry=hf_entry,
        problems=deepseek_v2.hf_problems,
        router=deepseek_v2.ROUTER,
        chosen=deepseek_v2.hf_chosen,
    ),
    "qwen3_moe": Conversion(
        config=qwen3_moe.hf_config,
        entry=hf_entry,
        problems=qwen3_moe.hf_problems,
        router=qwen3_moe.ROUTER,
        chosen=qwen3_moe.hf_chosen,
    ),
    "gpt_oss": Conversion(
        config=gpt_oss.hf_config,
        entry=gpt_oss.hf_entry,
        problems=gpt_oss.hf_problems,
        router=gpt_oss.ROUTER,
        chosen=gpt_oss.hf_chosen,
        attention="eager",  # torch's takes no sinks.
    ),
    "dense": Conversion(
        config=dense.hf_config,
        entry=hf_entry,
        problems=dense.hf_problems,
        router=None,
    ),
}
"""Family → its conversion."""
