"""Names and shapes of a family's parameters, from its config alone; no torch here (CFG-18).

Two views of the same weights. *Parameters* are what `named_parameters()` of the model gives, with the routed
experts stacked (FFN-2). *Canonical entries* are what checkpoints and Hugging Face files hold: one per expert
and projection, with global layer numbers (CKPT-1, HFN).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from src.models import hf

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

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Entry:
    """Where the tensor of one canonical name lives."""

    parameter: str
    """Name in `named_parameters()` of the whole model."""
    expert: int | None
    """Global id of the expert, the index into dimension 0 of the stack; None outside stacks."""
    rows: slice | None
    """Rows of the expert's matrix (or bias) that the entry is; None takes all."""
    shape: tuple[int, ...]
    """Shape of the entry, `[out, in]` for a matrix."""
    transposed: bool = False
    """Whether the parameter holds the expert's matrix as `[in, out]`; `rows` are those of `[out, in]`."""


def parameters(config: ModelConfig) -> Shapes:
    """Unsharded shape of each parameter of the whole model, in the order of the forward pass."""
    if config.family == "hf":
        return hf.shapes(cast("HfConfig", config))
    D = config.hidden_size
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary(config), D)}
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        shapes |= {f"{prefix}.{name}": shape for name, shape in _LAYERS[config.family](config, index).items()}
    shapes["model.norm.weight"] = (D,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (vocabulary(config), D)
    return shapes


def canonical(config: ModelConfig) -> dict[str, Entry]:
    """Canonical name → entry, for every tensor of a checkpoint of this model (CKPT-1)."""
    entries: dict[str, Entry] = {}
    for name, shape in parameters(config).items():
        if is_expert_stack(name) and config.family != "hf":  # There the stacks are transformers' own.
            entries |= _unstack(name, shape)
        else:
            entries[_released(config, name)] = Entry(name, None, None, shape)
    return entries


def is_expert_stack(name: str) -> bool:
    """Whether a parameter holds routed experts, one per index of dimension 0."""
    return ".mlp.experts." in name


def is_router(name: str) -> bool:
    """Whether a parameter is a router's: it computes in the masters' dtype under any precision (MOD-4)."""
    return ".mlp.gate." in name


def vocabulary(config: ModelConfig) -> int:
    """Rows of embedding and head; `ValueError` while they still wait for the tokenizer."""
    if config.vocab_size is None:
        raise ValueError(
            "model.vocab_size is null: resolve it from the tokenizer first, or set model.vocab_size=N"
        )
    return config.vocab_size


def is_bias(name: str) -> bool:
    """Whether a parameter is a bias, stacked ones of experts included."""
    return name.endswith(("_bias", ".bias"))


def is_moe_layer(config: ModelConfig, index: int) -> bool:
    """Whether the layer with this global index routes tokens to experts (TRAP-5)."""
    return _IS_MOE[config.family](config, index)


def window_of(config: ModelConfig, index: int) -> int | None:
    """Keys that a query sees at most in the layer with this global index, its own included; None sees all.

    Window W lets query i see the keys i - W < j <= i (ATT-6, TRAP-5).
    """
    return _WINDOWS[config.family](config, index) if config.family in _WINDOWS else None


def _released(config: ModelConfig, name: str) -> str:
    """The release's name of a parameter outside stacks: its router may be called otherwise (HFN)."""
    return name.replace(".mlp.gate.", f".mlp.{_ROUTERS.get(config.family, 'gate')}.")


def _unstack(name: str, shape: tuple[int, ...]) -> dict[str, Entry]:
    """Entries of one stack: `gate_up` [E,2F,D] holds the gate rows first, `down` is [E,D,F]; biases alike."""
    prefix, kind = name.rsplit(".", 1)
    experts, out = shape[0], shape[1]
    rows: dict[str, slice | None] = (
        {"gate_proj": slice(0, out // 2), "up_proj": slice(out // 2, out)}
        if kind.startswith("gate_up")
        else {"down_proj": None}
    )
    height, part = out // len(rows), "bias" if is_bias(name) else "weight"
    return {
        f"{prefix}.{expert}.{projection}.{part}": Entry(name, expert, span, (height, *shape[2:]))
        for expert in range(experts)
        for projection, span in rows.items()
    }


def _deepseek_v2_layer(config: DeepseekV2Config, index: int) -> Shapes:
    shapes = _decoder_layer(config, index, _latent_attention(config))
    if config.num_shared_experts and is_moe_layer(config, index):
        width = config.expert_size * config.num_shared_experts
        shapes |= _swiglu("mlp.shared_experts", config.hidden_size, width)
    return shapes


def _qwen3_moe_layer(config: Qwen3MoeConfig, index: int) -> Shapes:
    """Grouped-query attention with the norms over one head of queries and of keys (ATT-4)."""
    C = config.head_dim
    attention = _grouped_attention(config) | {"q_norm.weight": (C,), "k_norm.weight": (C,)}
    return _decoder_layer(config, index, attention)


def _gpt_oss_layer(config: GptOssConfig, index: int) -> Shapes:
    """A sink for each query head (ATT-5), and biases of router and experts (ROUTE-4, FFN-1)."""
    E, D, F = config.num_experts, config.hidden_size, config.expert_size
    attention: Shapes = {"sinks": (config.num_heads,)} | _grouped_attention(config)
    shapes = _decoder_layer(config, index, attention)
    shapes["mlp.gate.bias"] = (E,)
    return shapes | {"mlp.experts.gate_up_bias": (E, 2 * F), "mlp.experts.down_bias": (E, D)}


def _dense_layer(config: DenseConfig, index: int) -> Shapes:
    return _decoder_layer(config, index, _grouped_attention(config))


def _decoder_layer(config: MoeConfig | DenseConfig, index: int, attention: Shapes) -> Shapes:
    """Norms, attention, and the dense FFN or the routed experts of a pre-norm layer."""
    D = config.hidden_size
    shapes: Shapes = {"input_layernorm.weight": (D,)}
    shapes |= {f"self_attn.{name}": shape for name, shape in attention.items()}
    shapes["post_attention_layernorm.weight"] = (D,)
    if not is_moe_layer(config, index):
        return shapes | _swiglu("mlp", D, config.intermediate_size)
    E, F = config.num_experts, cast("MoeConfig", config).expert_size
    shapes["mlp.gate.weight"] = (E, D)
    return shapes | {"mlp.experts.gate_up": (E, 2 * F, D), "mlp.experts.down": (E, D, F)}


def _grouped_attention(config: Qwen3MoeConfig | GptOssConfig | DenseConfig) -> Shapes:
    """Its four projections; keys and values have heads of their own number."""
    D, C, bias = config.hidden_size, config.head_dim, config.attention_bias
    q_width, kv_width = config.num_heads * C, config.num_kv_heads * C
    shapes = _linear("q_proj", q_width, D, bias)
    shapes |= _linear("k_proj", kv_width, D, bias) | _linear("v_proj", kv_width, D, bias)
    return shapes | _linear("o_proj", D, q_width, bias)


def _latent_attention(config: DeepseekV2Config) -> Shapes:
    """Projections and latent norms of MLA (ATT-1); `attention_bias` touches q_a, kv_a and o only."""
    D, H, rank = config.hidden_size, config.num_heads, config.kv_lora_rank
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    width = H * (nope + rope)
    shapes: Shapes = {}
    if config.q_lora_rank is None:
        shapes["q_proj.weight"] = (width, D)
    else:
        shapes |= _linear("q_a_proj", config.q_lora_rank, D, config.attention_bias)
        shapes["q_a_layernorm.weight"] = (config.q_lora_rank,)
        shapes["q_b_proj.weight"] = (width, config.q_lora_rank)
    shapes |= _linear("kv_a_proj_with_mqa", rank + rope, D, config.attention_bias)
    shapes["kv_a_layernorm.weight"] = (rank,)
    shapes["kv_b_proj.weight"] = (H * (nope + value), rank)
    return shapes | _linear("o_proj", D, H * value, config.attention_bias)


def _linear(name: str, out: int, into: int, bias: bool) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (out, into)}
    return shapes | {f"{name}.bias": (out,)} if bias else shapes


def _swiglu(prefix: str, D: int, F: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (F, D),
        f"{prefix}.up_proj.weight": (F, D),
        f"{prefix}.down_proj.weight": (D, F),
    }


def _after_first_dense(config: DeepseekV2Config, index: int) -> bool:
    return index >= config.first_dense


def _by_list_or_step(config: Qwen3MoeConfig, index: int) -> bool:
    """ROUTE-3: dense if listed, and unless the layer's number from 1 is a multiple of the step."""
    return index not in config.mlp_only_layers and (index + 1) % config.decoder_sparse_step == 0


# Typed loosely: each function takes the config class of its own family.
_LAYERS: dict[str, Callable[..., Shapes]] = {
    "deepseek_v2": _deepseek_v2_layer,
    "qwen3_moe": _qwen3_moe_layer,
    "gpt_oss": _gpt_oss_layer,
    "dense": _dense_layer,
}
_IS_MOE: dict[str, Callable[..., bool]] = {
    "deepseek_v2": _after_first_dense,
    "qwen3_moe": _by_list_or_step,
    "gpt_oss": lambda config, index: True,
    "dense": lambda config, index: False,
    "hf": lambda config, index: False,  # Its routers are its own; nothing of ours looks at them.
}
_WINDOWS: dict[str, Callable[..., int | None]] = {
    "gpt_oss": lambda config, index: config.sliding_window if index % 2 == 0 else None,
}
_ROUTERS = {"gpt_oss": "router"}
"""Family → its release's name of the router, where that is not `gate`."""
