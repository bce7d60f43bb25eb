"""DeepSeek-V2 (arXiv 2405.04434): latent attention, shared experts, group-limited softmax routing.

Read top to bottom: attention, routing rule, the model. The stages of its layers are those of `decoder_layer`.
Letters as in `protocol`; H heads, C width of a query head (nope + rope), U width of a value
head, R rotary width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from src.kernels.declaration import Need
from src.kernels.registry import Ops
from src.models.causal_lm import CausalLM
from src.models.decoder_layer import DecoderLayer, MoE, Router, RoutingRule
from src.models.layers import Experts, Linear, RMSNorm, Rotary, SwiGLU, attend
from src.models.names import is_moe_layer
from src.models.protocol import Batch, Context
from src.models.rotary import softmax_factor
from src.models.schema import DeepseekV2Config

LATENT_EPS = 1e-6
"""The latent norms keep this eps whatever the config says (ATT-1)."""


class LatentAttention(nn.Module):
    """Multi-head latent attention (sec. 2.1): keys and values from one latent, one rotary key for all."""

    def __init__(self, config: DeepseekV2Config, ops: Ops) -> None:
        super().__init__()
        D, H, bias = config.hidden_size, config.num_heads, config.attention_bias
        nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.config, self.ops = config, ops
        self.scale = (nope + rope) ** -0.5 * softmax_factor(config.yarn)
        if config.q_lora_rank is None:
            self.q_proj = Linear(D, H * (nope + rope), ops)
        else:
            self.q_a_proj = Linear(D, config.q_lora_rank, ops, bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_EPS, ops)
            self.q_b_proj = Linear(config.q_lora_rank, H * (nope + rope), ops)
        self.kv_a_proj_with_mqa = Linear(D, config.kv_lora_rank + rope, ops, bias)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, LATENT_EPS, ops)
        self.kv_b_proj = Linear(config.kv_lora_rank, H * (nope + value), ops)
        self.o_proj = Linear(H * value, D, ops, bias)
        self.rotary = Rotary(rope, config.rope_theta, config.yarn)

    def forward(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """[T,D] → [T,D]; T = B·S of the batch."""
        x_BSD = x_TD.view(*batch.positions_BS.shape, self.config.hidden_size)
        q_BSHC, latent_BSL, k_BSR = self.project(x_BSD)
        angles = self.rotary(batch)
        if batch.context is not None:
            o_BSHU = self.attend_across(batch.context, batch.documents_BS, q_BSHC, latent_BSL, k_BSR, *angles)
        else:
            kv_BSHX = self.kv_b_proj(latent_BSL).unflatten(-1, (self.config.num_heads, -1))
            heads: tuple[Tensor, Tensor, Tensor]
            heads = self.ops.latent_heads(q_BSHC, kv_BSHX, k_BSR, *angles)
            o_BSHU = attend(self.ops, batch, *heads, self.scale)
        out: Tensor = self.o_proj(o_BSHU.flatten(2).flatten(0, 1))
        return out

    def project(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B,S,H,C], the normed latent [B,S,L] and the one rotary key [B,S,R]; nothing is rotated."""
        q_BSHC = self.queries(x_BSD).view(*x_BSD.shape[:2], self.config.num_heads, -1)
        latent_BSL, k_BSR = self.kv_a_proj_with_mqa(x_BSD).tensor_split([self.config.kv_lora_rank], -1)
        return q_BSHC, self.kv_a_layernorm(latent_BSL), k_BSR

    def attend_across(
        self,
        context: Context,
        documents_BS: Tensor | None,
        q_BSHC: Tensor,
        latent_BSL: Tensor,
        k_BSR: Tensor,
        cos_BSR: Tensor,
        sin_BSR: Tensor,
    ) -> Tensor:
        """Attention [B,S,H,U] over keys of other ranks: latent and rotated key travel, 576 numbers a token in
        V2-Lite where keys and values would be 5,120, and every rank makes keys and values of them itself."""
        nope = self.config.qk_nope_head_dim
        q_BSHN, q_BSHR = q_BSHC.tensor_split([nope], -1)
        q_BSHR = self.ops.rope(q_BSHR, cos_BSR, sin_BSR, interleaved=True)
        k_BSR = self.ops.rope(k_BSR[:, :, None], cos_BSR, sin_BSR, interleaved=True)[:, :, 0]

        def expand(latent_BSL: Tensor, k_BSR: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            kv_BSX = self.kv_b_proj.at_once(latent_BSL, weight)
            kv_BSHX = kv_BSX.view(*latent_BSL.shape[:2], self.config.num_heads, -1)
            k_BSHN, v_BSHU = kv_BSHX.tensor_split([nope], -1)
            k_BSHR = k_BSR[:, :, None].expand(*k_BSHN.shape[:3], -1)
            return torch.cat((k_BSHN, k_BSHR), -1), v_BSHU

        q_BSHC = torch.cat((q_BSHN, q_BSHR), -1)
        sent, weights = (latent_BSL, k_BSR), (self.kv_b_proj.weight,)
        return context.attend(q_BSHC, sent, expand, weights, self.scale, documents_BS)

    def queries(self, x_BSD: Tensor) -> Tensor:
        """[B,S,H·C], through the query's latent if the config has one."""
        direct = self.config.q_lora_rank is None
        q: Tensor = self.q_proj(x_BSD) if direct else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSD)))
        return q


def routing_rule(config: DeepseekV2Config) -> RoutingRule:
    """Groups if the config asks for them, and weights that are scaled but not renormalised (ROUTE-1)."""
    if config.routing == "greedy":
        return RoutingRule(scale=config.routed_scaling)
    return RoutingRule(config.num_groups, config.groups_kept, scale=config.routed_scaling)


class DeepseekV2(CausalLM[DeepseekV2Config]):
    """The causal language model; see `CausalLM` for what the engine calls."""

    def layer(self, index: int, experts: range, ops: Ops) -> DecoderLayer:
        """The decoder layer with global number `index`."""
        config = self.config
        is_moe, dense_size = is_moe_layer(config, index), config.intermediate_size
        mlp = self.moe(experts, ops) if is_moe else SwiGLU(config.hidden_size, dense_size, ops)
        return DecoderLayer(config, LatentAttention(config, ops), mlp, ops)

    def moe(self, experts: range, ops: Ops) -> MoE:
        """The routed experts of a layer, and the shared ones as one FFN (sec. 2.2.1)."""
        config = self.config
        width = config.expert_size * config.num_shared_experts
        shared = SwiGLU(config.hidden_size, width, ops) if width else None
        routed = Experts(len(experts), config.hidden_size, config.expert_size, ops)
        return MoE(Router(config, routing_rule(config), ops), routed, shared)

    @staticmethod
    def needs(config: DeepseekV2Config) -> dict[str, Need]:
        """What this model asks of the operations whose implementations differ in ability."""
        key = config.qk_nope_head_dim + config.qk_rope_head_dim
        features = {"packed"} if key == config.v_head_dim else {"packed", "unequal_widths"}
        products = Need(widths={"hidden_size": config.hidden_size, "expert_size": config.expert_size})
        return {
            "attention": Need(frozenset(features), {"key": key, "value": config.v_head_dim}),
            "grouped_mm": products,
            "local_experts": products,
        }
