"""gpt-oss in Hugging Face's words; stacks are transposed there, gate and up in turn (HFN, FFN-2)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from src.errors import Problem
from src.models.convert.rope import rope_parameters
from src.models.names import Entry, is_bias, vocabulary, window_of
from src.models.schema import GptOssConfig


def hf_config(config: GptOssConfig) -> dict[str, Any]:
    """The `config.json` of transformers' `GptOssForCausalLM`, every number written out (MOD-1)."""
    windows = [window_of(config, index) for index in range(config.num_layers)]
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
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
        "sliding_window": config.sliding_window,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
        "rope_parameters": rope_parameters(config.rope_theta, config.yarn),
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.top_k,
        "intermediate_size": config.expert_size,
        "swiglu_limit": config.swiglu_limit,
        "swiglu_alpha": config.swiglu_alpha,
        "hidden_act": "silu",
    }


ROUTER = "mlp.router"
"""The router within a decoder layer of transformers; it returns logits [T,E], weights [T,K] and ids [T,K]."""
STACKS = {
    "gate_up": "gate_up_proj",
    "down": "down_proj",
    "gate_up_bias": "gate_up_proj_bias",
    "down_bias": "down_proj_bias",
}
"""Stack here → in transformers' module: [E,D,2F] and [E,F,D] there, biases as here."""


def hf_entry(entry: Entry) -> Entry:
    """Where transformers' model holds what our parameter of that entry does."""
    prefix, kind = entry.parameter.rsplit(".", 1)
    if entry.expert is None:
        return replace(entry, parameter=entry.parameter.replace(".mlp.gate.", f".{ROUTER}."))
    rows = entry.rows
    if rows is not None:  # The gate's come first here, and are the even ones there.
        rows = slice(0 if rows.start == 0 else 1, None, 2)
    return replace(entry, parameter=f"{prefix}.{STACKS[kind]}", rows=rows, transposed=not is_bias(kind))


def hf_problems(config: GptOssConfig) -> list[Problem]:
    """What transformers' `GptOssForCausalLM` cannot be: nothing that we can."""
    return []


def hf_chosen(config: GptOssConfig) -> dict[str, Any]:
    """How transformers weighs the experts that a token visits."""
    return {"renormalise": False, "scale": 1.0, "scoring": "softmax_of_chosen"}
