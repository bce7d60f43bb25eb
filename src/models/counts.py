"""Parameter counts and FLOPs of a config, for plans, memory estimates and MFU; no torch here (MOD-2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, cast

from src.models.names import is_bias, is_expert_stack, is_moe_layer, parameters, window_of

if TYPE_CHECKING:
    from src.models.schema import (
        DeepseekV2Config,
        DenseConfig,
        GptOssConfig,
        HfConfig,
        ModelConfig,
        MoeConfig,
        Qwen3MoeConfig,
    )


@dataclass(frozen=True)
class LayerCount:
    """Parameters of one decoder layer."""

    experts: int
    """In routed experts; 0 for a dense layer."""
    rest: int
    """Everything else: attention, norms, router, shared experts or dense FFN."""


@dataclass(frozen=True)
class Counts:
    """Parameters of a model; routing biases are buffers and not counted."""

    total: int
    """All parameters."""
    active: int
    """All but routed experts, plus K/E of those; embedding included."""
    matmul: int
    """N_mm: active weights of matrix products; embedding, gains and biases are out, the head is in."""
    embedding: int
    """V·D of one table; a head that is not tied has as many."""
    layers: tuple[LayerCount, ...]
    """By global layer index."""


def count(config: ModelConfig) -> Counts:
    """Counts of the whole model, each derived from the shapes of `names.parameters`."""
    shapes = parameters(config)
    sizes = {name: prod(shape) for name, shape in shapes.items()}
    active = {name: _active(config, name, size) for name, size in sizes.items()}
    embedding = sizes["model.embed_tokens.weight"]
    # A tied head multiplies by the embedding's table, so that table is a matrix product after all.
    matmul = sum(active[name] for name, shape in shapes.items() if len(shape) > 1 and not is_bias(name))
    return Counts(
        total=sum(sizes.values()),
        active=sum(active.values()),
        matmul=matmul if config.tie_embeddings else matmul - embedding,
        embedding=embedding,
        layers=tuple(_layer(sizes, index) for index in range(config.num_layers)),
    )


def flops_per_token(config: ModelConfig, sequence_length: int, causal: bool = True) -> int:
    """Training FLOPs per token: 6·N_mm plus 6·k·H·(d_qk + d_v) per attention layer, without recomputation.

    `causal` counts k = S/2 keys per query, as Megatron-Bridge and AutoModel do; else k = S, as torchtitan. A
    layer with a window of W keys counts min(k, W).
    """
    seen = sequence_length / 2 if causal else sequence_length
    windows = (window_of(config, index) for index in range(config.num_layers))
    keys = sum(seen if window is None else min(seen, window) for window in windows)
    return int(6 * count(config).matmul + 6 * keys * _HEAD_WIDTHS[config.family](config))


def moe_layers(config: ModelConfig) -> list[int]:
    """Global indices of the layers with routed experts."""
    return [index for index in range(config.num_layers) if is_moe_layer(config, index)]


def _active(config: ModelConfig, name: str, size: int) -> int:
    if not is_expert_stack(name):
        return size
    return size // config.num_experts * cast("MoeConfig", config).top_k


def _latent_widths(config: DeepseekV2Config) -> int:
    return config.num_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)


def _grouped_widths(config: Qwen3MoeConfig | GptOssConfig | DenseConfig | HfConfig) -> int:
    return config.num_heads * 2 * config.head_dim


# H·(d_qk + d_v) of one attention layer. Typed loosely: each function takes its family's config class.
_HEAD_WIDTHS: dict[str, Callable[..., int]] = {
    "deepseek_v2": _latent_widths,
    "qwen3_moe": _grouped_widths,
    "gpt_oss": _grouped_widths,
    "dense": _grouped_widths,
    "hf": _grouped_widths,
}


def _layer(sizes: dict[str, int], index: int) -> LayerCount:
    mine = {name: size for name, size in sizes.items() if name.startswith(f"model.layers.{index}.")}
    experts = sum(size for name, size in mine.items() if is_expert_stack(name))
    return LayerCount(experts, sum(mine.values()) - experts)
