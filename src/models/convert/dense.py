"""The dense family in Hugging Face's words: its model is Llama's, names and shapes are the same (HFN)."""

from __future__ import annotations

from typing import Any

from src.errors import Problem
from src.models.names import vocabulary
from src.models.schema import DenseConfig


def hf_config(config: DenseConfig) -> dict[str, Any]:
    """The `config.json` of transformers' `LlamaForCausalLM`, every number written out (MOD-1)."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
        "mlp_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
    }


def hf_problems(config: DenseConfig) -> list[Problem]:
    """What transformers' `LlamaForCausalLM` cannot be."""
    if config.hidden_size % config.num_heads == 0:
        return []
    message = f"transformers wants a multiple of num_heads={config.num_heads}, not {config.hidden_size}"
    fix = f"model.hidden_size={(config.hidden_size // config.num_heads + 1) * config.num_heads}"
    return [Problem("model.hidden_size", message, fix, "backend")]
