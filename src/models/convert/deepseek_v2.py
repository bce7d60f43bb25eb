"""DeepSeek-V2 in Hugging Face's words; its files use our canonical names, shapes and layout (HFN)."""

from __future__ import annotations

from typing import Any

from src.errors import Problem
from src.models.convert.rope import rope_parameters
from src.models.names import vocabulary
from src.models.schema import DeepseekV2Config


def hf_config(config: DeepseekV2Config) -> dict[str, Any]:
    """The `config.json` of transformers' `DeepseekV2ForCausalLM`, every number written out (MOD-1)."""
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": vocabulary(config),
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "attention_bias": config.attention_bias,
        "rope_parameters": rope_parameters(config.rope_theta, config.yarn),
        "first_k_dense_replace": config.first_dense,
        "moe_layer_freq": 1,
        "intermediate_size": config.intermediate_size,
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.top_k,
        "moe_intermediate_size": config.expert_size,
        "n_shared_experts": config.num_shared_experts,
        "topk_method": config.routing,
        "n_group": config.num_groups,
        "topk_group": config.groups_kept,
        "routed_scaling_factor": config.routed_scaling,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "hidden_act": "silu",
    }


ROUTER = "mlp.gate"
"""The router within a decoder layer of transformers; it returns logits [T,E], weights [T,K] and ids [T,K]."""


def hf_problems(config: DeepseekV2Config) -> list[Problem]:
    """What transformers' `DeepseekV2ForCausalLM` cannot be."""
    problems = []
    if config.num_shared_experts == 0:
        message = "transformers always builds the shared experts of a DeepSeek-V2"
        problems.append(Problem("model.num_shared_experts", message, "model.num_shared_experts=1", "backend"))
    if (config.kv_lora_rank + config.qk_rope_head_dim) % 2:
        message = f"transformers takes even widths of latent and rotary key only, not {config.kv_lora_rank}"
        fix = f"model.kv_lora_rank={config.kv_lora_rank + 1}"
        problems.append(Problem("model.kv_lora_rank", message, fix, "ATT-2"))
    if config.hidden_size % config.num_heads:
        message = f"transformers wants a multiple of num_heads={config.num_heads}, not {config.hidden_size}"
        fix = f"model.hidden_size={(config.hidden_size // config.num_heads + 1) * config.num_heads}"
        problems.append(Problem("model.hidden_size", message, fix, "backend"))
    return problems


def hf_chosen(config: DeepseekV2Config) -> dict[str, Any]:
    """How transformers weighs the experts that a token visits."""
    return {"renormalise": False, "scale": config.routed_scaling}
