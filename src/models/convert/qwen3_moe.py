"""Qwen3-MoE in Hugging Face's words; its files use our canonical names, shapes and layout (HFN)."""

from __future__ import annotations

from typing import Any

from src.errors import Problem
from src.models.names import vocabulary
from src.models.schema import Qwen3MoeConfig


def hf_config(config: Qwen3MoeConfig) -> dict[str, Any]:
    """The `config.json` of transformers' `Qwen3MoeForCausalLM`, every number written out (MOD-1)."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": vocabulary(config),
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "attention_bias": config.attention_bias,
        "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "intermediate_size": config.intermediate_size,
        "mlp_only_layers": list(config.mlp_only_layers),
        "decoder_sparse_step": config.decoder_sparse_step,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.top_k,
        "moe_intermediate_size": config.expert_size,
        "norm_topk_prob": config.norm_topk_prob,
        "hidden_act": "silu",
    }


ROUTER = "mlp.gate"
"""The router within a decoder layer of transformers; it returns logits [T,E], weights [T,K] and ids [T,K]."""


def hf_problems(config: Qwen3MoeConfig) -> list[Problem]:
    """What transformers' `Qwen3MoeForCausalLM` cannot be: nothing that we can."""
    return []


def hf_chosen(config: Qwen3MoeConfig) -> dict[str, Any]:
    """How transformers weighs the experts that a token visits."""
    return {"renormalise": config.norm_topk_prob, "scale": 1.0}
