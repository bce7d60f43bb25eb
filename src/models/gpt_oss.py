"""gpt-oss (arXiv 2508.10925): attention sinks, windows in every second layer, biases, a clamped SwiGLU.

Read top to bottom: attention, then the model. The stages of its layers are those of `decoder_layer`. Letters
as in `protocol`; H query heads, G heads of keys and values, C width of a head.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from src.kernels.declaration import Need
from src.kernels.registry import Ops
from src.models.causal_lm import CausalLM
from src.models.decoder_layer import DecoderLayer, MoE, Router, RoutingRule
from src.models.layers import SINKS, BiasedExperts, Linear, ParamSpec, Rotary, attend
from src.models.names import window_of
from src.models.protocol import Batch
from src.models.schema import GptOssConfig


class SinkAttention(nn.Module):
    """Grouped-query attention whose softmax has one more logit per head, without a value (ATT-5)."""

    specs: ClassVar[dict[str, ParamSpec]] = {"sinks": SINKS}

    def __init__(self, config: GptOssConfig, window: int | None, ops: Ops) -> None:
        """`window` is that of the layer, None where it sees everything before (ATT-6)."""
        super().__init__()
        D, H, G, C = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.config, self.ops, self.window = config, ops, window
        self.scale = C**-0.5
        self.sinks = nn.Parameter(torch.empty(H))
        self.q_proj = Linear(D, H * C, ops, config.attention_bias)
        self.k_proj = Linear(D, G * C, ops, config.attention_bias)
        self.v_proj = Linear(D, G * C, ops, config.attention_bias)
        self.o_proj = Linear(H * C, D, ops, config.attention_bias)
        self.rotary = Rotary(C, config.rope_theta, config.yarn)

    def forward(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """[T,D] → [T,D]; T = B·S of the batch."""
        x_BSD = x_TD.view(*batch.positions_BS.shape, self.config.hidden_size)
        q_BSHC, k_BSGC, v_BSGC = self.heads(x_BSD, *self.rotary(batch))
        o_BSHC = attend(self.ops, batch, q_BSHC, k_BSGC, v_BSGC, self.scale, self.window, self.sinks)
        out: Tensor = self.o_proj(o_BSHC.flatten(2).flatten(0, 1))
        return out

    def heads(self, x_BSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B,S,H,C], keys and values [B,S,G,C]; the rotary pairs lie half a head apart (ATT-2)."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q_BSHC, k_BSGC, v_BSGC = (p(x_BSD).unflatten(-1, (-1, self.config.head_dim)) for p in projections)
        return *self.ops.rotary_heads(q_BSHC, k_BSGC, cos_BSR, sin_BSR), v_BSGC


class GptOss(CausalLM[GptOssConfig]):
    """The causal language model; see `CausalLM` for what the engine calls."""

    def layer(self, index: int, experts: range, ops: Ops) -> DecoderLayer:
        """The decoder layer with global number `index`."""
        config = self.config
        attention = SinkAttention(config, window_of(config, index), ops)
        return DecoderLayer(config, attention, self.moe(experts, ops), ops)

    def moe(self, experts: range, ops: Ops) -> MoE:
        """The routed experts of a layer: those with the largest logits, a softmax over these (ROUTE-4)."""
        config, rule = self.config, RoutingRule(scoring="softmax_of_chosen")
        sizes = (len(experts), config.hidden_size, config.expert_size)
        routed = BiasedExperts(*sizes, ops, config.swiglu_limit, config.swiglu_alpha)
        return MoE(Router(config, rule, ops, bias=True), routed)

    @staticmethod
    def needs(config: GptOssConfig) -> dict[str, Need]:
        """What this model asks of the operations whose implementations differ in ability."""
        features = {"packed", "window", "sinks"} | (
            {"gqa"} if config.num_kv_heads < config.num_heads else set()
        )
        products = Need(widths={"hidden_size": config.hidden_size, "expert_size": config.expert_size})
        return {
            "attention": Need(frozenset(features), {"key": config.head_dim, "value": config.head_dim}),
            "grouped_mm": products,
            "local_experts": products.plus("biased_experts"),
            "swiglu": Need(frozenset({"clamped"})),
        }
