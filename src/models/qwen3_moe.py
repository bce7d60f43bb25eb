"""Qwen3-MoE (arXiv 2505.09388): grouped-query attention with normed queries and keys, no shared expert.

Read top to bottom: attention, then the model. The stages of its layers are those of `decoder_layer`. Letters
as in `protocol`; H query heads, G heads of keys and values, C width of a head.
"""

from __future__ import annotations

from torch import Tensor, nn

from src.kernels.declaration import Need
from src.kernels.registry import Ops
from src.models.causal_lm import CausalLM
from src.models.decoder_layer import DecoderLayer, MoE, Router, RoutingRule
from src.models.layers import Experts, Linear, RMSNorm, Rotary, SwiGLU, attend
from src.models.names import is_moe_layer
from src.models.protocol import Batch
from src.models.schema import DenseConfig, Qwen3MoeConfig, YarnConfig


class GroupedAttention(nn.Module):
    """Grouped-query attention, queries and keys normed per head before they are rotated (ATT-4), or not."""

    def __init__(self, config: Qwen3MoeConfig | DenseConfig, ops: Ops, normed: bool = True) -> None:
        super().__init__()
        D, H, G, C = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.config, self.ops = config, ops
        self.scale = C**-0.5
        self.q_proj = Linear(D, H * C, ops, config.attention_bias)
        self.k_proj = Linear(D, G * C, ops, config.attention_bias)
        self.v_proj = Linear(D, G * C, ops, config.attention_bias)
        self.o_proj = Linear(H * C, D, ops, config.attention_bias)
        self.q_norm = RMSNorm(C, config.rms_norm_eps, ops) if normed else nn.Identity()
        self.k_norm = RMSNorm(C, config.rms_norm_eps, ops) if normed else nn.Identity()
        self.rotary = Rotary(C, config.rope_theta, YarnConfig())

    def forward(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """[T,D] → [T,D]; T = B·S of the batch."""
        x_BSD = x_TD.view(*batch.positions_BS.shape, self.config.hidden_size)
        q_BSHC, k_BSGC, v_BSGC = self.heads(x_BSD, *self.rotary(batch))
        o_BSHC = attend(self.ops, batch, q_BSHC, k_BSGC, v_BSGC, self.scale)
        out: Tensor = self.o_proj(o_BSHC.flatten(2).flatten(0, 1))
        return out

    def heads(self, x_BSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B,S,H,C], keys and values [B,S,G,C]; the rotary pairs lie half a head apart (ATT-2)."""
        C, normed = self.config.head_dim, isinstance(self.q_norm, RMSNorm)
        q_BSHC, k_BSGC, v_BSGC = (
            p(x_BSD).unflatten(-1, (-1, C)) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        gains = (self.q_norm.weight, self.k_norm.weight) if normed else None
        heads = self.ops.rotary_heads(q_BSHC, k_BSGC, cos_BSR, sin_BSR, gains, self.config.rms_norm_eps)
        return *heads, v_BSGC


def attention_need(config: Qwen3MoeConfig | DenseConfig) -> Need:
    """What grouped-query attention asks of the operation."""
    features = {"packed"} if config.num_kv_heads == config.num_heads else {"packed", "gqa"}
    return Need(frozenset(features), {"key": config.head_dim, "value": config.head_dim})


class Qwen3Moe(CausalLM[Qwen3MoeConfig]):
    """The causal language model; see `CausalLM` for what the engine calls."""

    def layer(self, index: int, experts: range, ops: Ops) -> DecoderLayer:
        """The decoder layer with global number `index`."""
        config = self.config
        is_moe, dense_size = is_moe_layer(config, index), config.intermediate_size
        mlp = self.moe(experts, ops) if is_moe else SwiGLU(config.hidden_size, dense_size, ops)
        return DecoderLayer(config, GroupedAttention(config, ops), mlp, ops)

    def moe(self, experts: range, ops: Ops) -> MoE:
        """The routed experts of a layer, by the K largest scores (ROUTE-3)."""
        config, rule = self.config, RoutingRule(renormalise=self.config.norm_topk_prob)
        routed = Experts(len(experts), config.hidden_size, config.expert_size, ops)
        return MoE(Router(config, rule, ops), routed)

    @staticmethod
    def needs(config: Qwen3MoeConfig) -> dict[str, Need]:
        """What this model asks of the operations whose implementations differ in ability."""
        products = Need(widths={"hidden_size": config.hidden_size, "expert_size": config.expert_size})
        return {
            "attention": attention_need(config),
            "grouped_mm": products,
            "local_experts": products,
        }
