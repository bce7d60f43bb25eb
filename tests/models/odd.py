"""The odd member of each family: no square, nothing divisible by chance (MOD-3); lives in tests only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from src.models.schema import (
    DeepseekV2Config,
    DenseConfig,
    GptOssConfig,
    ModelConfig,
    Qwen3MoeConfig,
    YarnConfig,
)


def deepseek_v2(**changes: Any) -> DeepseekV2Config:
    """The odd DeepSeek-V2, with fields replaced by `changes`."""
    config = DeepseekV2Config(
        family="deepseek_v2",
        name="odd",
        vocab_size=97,
        hidden_size=45,
        num_layers=3,
        context=256,
        rms_norm_eps=1e-3,
        num_heads=3,
        q_lora_rank=13,
        kv_lora_rank=14,
        qk_nope_head_dim=10,
        qk_rope_head_dim=6,
        v_head_dim=7,
        rope_theta=100.0,
        yarn=YarnConfig(factor=4.0, original_length=64, mscale=0.707, mscale_all_dim=0.707),
        first_dense=1,
        intermediate_size=31,
        num_experts=15,
        top_k=3,
        expert_size=9,
        num_shared_experts=2,
        routing="group_limited_greedy",
        num_groups=5,
        groups_kept=2,
        routed_scaling=2.0,
    )
    return replace(config, **changes)


def qwen3_moe(**changes: Any) -> Qwen3MoeConfig:
    """The odd Qwen3-MoE, with fields replaced by `changes`."""
    config = Qwen3MoeConfig(
        family="qwen3_moe",
        name="odd",
        vocab_size=103,
        hidden_size=44,
        num_layers=3,
        context=256,
        rms_norm_eps=1e-3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=10,
        rope_theta=100.0,
        intermediate_size=31,
        mlp_only_layers=[1],
        num_experts=7,
        top_k=3,
        expert_size=14,
    )
    return replace(config, **changes)


def gpt_oss(**changes: Any) -> GptOssConfig:
    """The odd gpt-oss, with fields replaced by `changes`; its activations reach the bound of the SwiGLU."""
    config = GptOssConfig(
        family="gpt_oss",
        name="odd",
        vocab_size=101,
        hidden_size=36,
        num_layers=3,
        context=256,
        rms_norm_eps=1e-3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=10,
        sliding_window=5,
        rope_theta=150.0,
        yarn=YarnConfig(factor=4.0, original_length=64, truncate=False),
        num_experts=5,
        top_k=2,
        expert_size=22,
        swiglu_limit=0.5,
    )
    return replace(config, **changes)


def dense(**changes: Any) -> DenseConfig:
    """The odd dense model, with fields replaced by `changes`; transformers wants D in whole heads."""
    config = DenseConfig(
        family="dense",
        name="odd",
        vocab_size=101,
        hidden_size=42,
        num_layers=3,
        context=256,
        rms_norm_eps=1e-3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=10,
        rope_theta=100.0,
        intermediate_size=31,
    )
    return replace(config, **changes)


MEMBERS: dict[str, Callable[..., ModelConfig]] = {
    "deepseek_v2": deepseek_v2,
    "qwen3_moe": qwen3_moe,
    "gpt_oss": gpt_oss,
    "dense": dense,
}
MIXTURES = [family for family, member in MEMBERS.items() if member().num_experts]
"""Families with routed experts."""
"""Family → what makes its odd member."""
