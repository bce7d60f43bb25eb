"""Architecture configs, one dataclass per family; no torch here, so composition stays fast (CFG-18)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def choice(default: str, *others: str) -> Any:
    """A ``str`` field that takes only the names given, the default among them."""
    return field(default=default, metadata={"choices": (default, *others)})


@dataclass
class YarnConfig:
    """YaRN extension of the rotary frequencies (ATT-3); `factor` 1 is plain rotary."""

    factor: float = 1.0
    """How many times longer than the original context."""
    original_length: int = 4096
    """Context length that the frequencies were made for."""
    beta_fast: float = 32.0
    """Rotations above which a frequency is kept."""
    beta_slow: float = 1.0
    """Rotations below which a frequency is divided by `factor`."""
    mscale: float = 0.0
    """Factor in the numerator of the cos/sin scale; 0 is absent."""
    mscale_all_dim: float = 0.0
    """Factor of the softmax scale, squared, and in the denominator of the cos/sin scale; 0 is absent."""
    truncate: bool = True
    """Round the bounds of the ramp to whole dimensions."""


@dataclass
class ModelConfig:
    """What every family has: widths and depths, no parallel size and no kernel choice (MOD-1)."""

    family: str = "???"
    """Name of the model class."""
    name: str = "???"
    """Name of the preset: `family` or `family/size`."""
    vocab_size: int | None = None
    """Rows of embedding and head; null follows the tokenizer."""
    hidden_size: int = 64
    """Width D of the residual stream."""
    num_layers: int = 1
    """Decoder layers L."""
    num_experts: int = 0
    """Routed experts E; 0 in a dense model."""
    context: int = 4096
    """Longest sequence the positions are meant for."""
    rms_norm_eps: float = 1e-6
    """Term under the root of the layer norms."""
    tie_embeddings: bool = False
    """Share embedding and head."""


@dataclass
class MoeConfig(ModelConfig):
    """What every family with routed experts has."""

    num_experts: int = 16
    """Routed experts E."""
    top_k: int = 3
    """Experts K that a token visits."""
    expert_size: int = 40
    """Width F of an expert."""
    intermediate_size: int = 176
    """Width of the FFN of a dense layer."""


@dataclass
class DeepseekV2Config(MoeConfig):
    """DeepSeek-V2: latent attention, shared and routed experts, group-limited softmax routing."""

    num_heads: int = 4
    """Query heads."""
    q_lora_rank: int | None = None
    """Rank of the query's latent; null projects queries directly."""
    kv_lora_rank: int = 16
    """Rank of the latent of keys and values."""
    qk_nope_head_dim: int = 16
    """Width of a head's part without rotation."""
    qk_rope_head_dim: int = 8
    """Width of a head's rotated part."""
    v_head_dim: int = 12
    """Width of a value head."""
    attention_bias: bool = False
    """Bias on the latent and output projections."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    yarn: YarnConfig = field(default_factory=YarnConfig)
    first_dense: int = 1
    """Leading layers with a dense FFN."""
    num_shared_experts: int = 2
    """Shared experts, computed as one FFN of this many times `expert_size`."""
    routing: str = choice("greedy", "group_limited_greedy")
    """How the K experts are chosen."""
    num_groups: int = 1
    """Groups of experts (group_limited_greedy)."""
    groups_kept: int = 1
    """Groups a token may choose from (group_limited_greedy)."""
    routed_scaling: float = 1.0
    """Factor on the routing weights."""


@dataclass
class Qwen3MoeConfig(MoeConfig):
    """Qwen3-MoE: grouped-query attention with norms on queries and keys, routing weights that sum to 1."""

    num_heads: int = 6
    """Query heads."""
    num_kv_heads: int = 2
    """Heads of keys and values; each serves num_heads/num_kv_heads query heads."""
    head_dim: int = 16
    """Width of a head, whatever hidden_size is."""
    attention_bias: bool = False
    """Bias on the four projections of attention."""
    rope_theta: float = 1000000.0
    """Base of the rotary frequencies."""
    mlp_only_layers: list[int] = field(default_factory=list)
    """Global indices of layers with a dense FFN, counted from 0."""
    decoder_sparse_step: int = 1
    """Only every so-many-th layer has experts: layer i if i + 1 is a multiple."""
    top_k: int = 4
    """Experts K that a token visits."""
    norm_topk_prob: bool = True
    """Divide a token's routing weights by their sum."""


@dataclass
class GptOssConfig(MoeConfig):
    """The gpt-oss family: sinks, windows in every second layer, biases throughout, a clamped SwiGLU."""

    num_experts: int = 8
    """Routed experts E."""
    top_k: int = 2
    """Experts K that a token visits."""
    expert_size: int = 48
    """Width F of an expert."""
    intermediate_size: int = 0
    """Every layer has experts, so there is no dense FFN and this stays 0."""
    num_heads: int = 6
    """Query heads; each has a sink, one more logit in the denominator of its softmax."""
    num_kv_heads: int = 2
    """Heads of keys and values; each serves num_heads/num_kv_heads query heads."""
    head_dim: int = 16
    """Width of a head, whatever hidden_size is."""
    attention_bias: bool = True
    """Bias on the four projections of attention."""
    sliding_window: int = 8
    """Keys that a query of an even layer (counted from 0) sees at most, its own included."""
    rope_theta: float = 150000.0
    """Base of the rotary frequencies."""
    yarn: YarnConfig = field(default_factory=YarnConfig)
    swiglu_limit: float = 7.0
    """Bound of the experts' gate from above, and of their up projection on both sides."""
    swiglu_alpha: float = 1.702
    """Factor on the gate within the sigmoid."""


@dataclass
class DenseConfig(ModelConfig):
    """Llama-like: grouped-query attention and a SwiGLU in every layer, no experts."""

    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int = 2
    """Heads of keys and values; each serves num_heads/num_kv_heads query heads."""
    head_dim: int = 24
    """Width of a head, whatever hidden_size is."""
    attention_bias: bool = False
    """Bias on the four projections of attention."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    intermediate_size: int = 176
    """Width of the FFN."""
    match: str | None = None
    """`PRESET:active` or `PRESET:flops`: take the sizes of that model, and as many parameters or FLOPs."""
    match_target: int | None = None
    """Active parameters, or FLOPs per token, that `match` asks for; set when a run is composed."""


@dataclass
class HfConfig(ModelConfig):
    """A causal language model of transformers, described by a directory; for backend=transformers.

    All but the path is read from its `config.json`.
    """

    path: str = "???"
    """Directory with `config.json`, and with weights to start from if it has some."""
    num_heads: int = 0
    """Query heads."""
    head_dim: int = 0
    """Width of a head."""
    top_k: int = 0
    """Experts that a token visits; 0 in a dense model."""
    content: str | None = None
    """Digest of description and weight files, which are part of what a run is."""


FAMILIES: dict[str, type[ModelConfig]] = {
    "deepseek_v2": DeepseekV2Config,
    "qwen3_moe": Qwen3MoeConfig,
    "gpt_oss": GptOssConfig,
    "dense": DenseConfig,
    "hf": HfConfig,
}
"""The config class that `model.family` names (CFG-9)."""
