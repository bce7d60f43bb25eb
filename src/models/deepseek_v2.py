"""DeepSeek-V2 (arXiv 2405.04434): latent attention, shared experts, group-limited softmax routing.

Read top to bottom: attention, router, a decoder layer cut in its stages, the model. Letters as in `protocol`;
H heads, C width of a query head (nope + rope), U width of a value head, R rotary width.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from src.kernels.declaration import Need
from src.kernels.registry import Ops
from src.kernels.route import Routed
from src.models.causal_lm import CausalLM
from src.models.layers import ROUTER, Experts, Linear, ParamSpec, RMSNorm, Rotary, SwiGLU
from src.models.names import is_moe_layer
from src.models.protocol import Batch, Carry, Dispatcher, Routing, run_layer
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
            self.q_proj = Linear(D, H * (nope + rope))
        else:
            self.q_a_proj = Linear(D, config.q_lora_rank, bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_EPS, ops)
            self.q_b_proj = Linear(config.q_lora_rank, H * (nope + rope))
        self.kv_a_proj_with_mqa = Linear(D, config.kv_lora_rank + rope, bias)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, LATENT_EPS, ops)
        self.kv_b_proj = Linear(config.kv_lora_rank, H * (nope + value))
        self.o_proj = Linear(H * value, D, bias)
        self.rotary = Rotary(rope, config.rope_theta, config.yarn)

    def forward(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """[T,D] → [T,D]; T = B·S of the batch."""
        x_BSD = x_TD.view(*batch.positions_BS.shape, self.config.hidden_size)
        q_BSHC, k_BSHC, v_BSHU = self.heads(x_BSD, *self.rotary(batch))
        o_BSHU, _ = self.ops.attention(q_BSHC, k_BSHC, v_BSHU, self.scale, batch.documents_BS)
        out: Tensor = self.o_proj(o_BSHU.flatten(2).flatten(0, 1))
        return out

    def heads(self, x_BSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B,S,H,C], each [without rotation | rotated], and values [B,S,H,U]."""
        config, rope = self.config, self.ops.rope
        nope, H = config.qk_nope_head_dim, config.num_heads
        per_head = (*x_BSD.shape[:2], H)
        q_BSHC = self.queries(x_BSD).view(*per_head, nope + config.qk_rope_head_dim)
        q_BSHN, q_BSHR = q_BSHC.tensor_split([nope], -1)
        latent_BSL, k_BSR = self.kv_a_proj_with_mqa(x_BSD).tensor_split([config.kv_lora_rank], -1)
        kv_BSHX = self.kv_b_proj(self.kv_a_layernorm(latent_BSL)).view(*per_head, nope + config.v_head_dim)
        k_BSHN, v_BSHU = kv_BSHX.tensor_split([nope], -1)
        k_BS1R = rope(k_BSR[:, :, None], cos_BSR, sin_BSR, interleaved=True)
        q_BSHC = torch.cat((q_BSHN, rope(q_BSHR, cos_BSR, sin_BSR, interleaved=True)), -1)
        k_BSHC = torch.cat((k_BSHN, k_BS1R.expand(-1, -1, H, -1)), -1)
        return q_BSHC, k_BSHC, v_BSHU

    def queries(self, x_BSD: Tensor) -> Tensor:
        """[B,S,H·C], through the query's latent if the config has one."""
        direct = self.config.q_lora_rank is None
        q: Tensor = self.q_proj(x_BSD) if direct else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSD)))
        return q


class Router(nn.Module):
    """Chooses K experts of each token and their weights (ROUTE-1)."""

    specs: ClassVar[dict[str, ParamSpec]] = {"weight": ROUTER}

    def __init__(self, config: DeepseekV2Config, layer: int, ops: Ops) -> None:
        super().__init__()
        self.config, self.layer, self.ops = config, layer, ops
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, x_TD: Tensor, batch: Batch) -> Routing:
        """Ids and weights [T,K]; the engine's balance may replace the ids and add to the gradient."""
        logits_TE = self.ops.router_linear(x_TD, self.weight)
        routed = self.route(logits_TE, None)
        if batch.balance is None:
            return Routing(routed.ids_TK, routed.weights_TK)
        ids_TK = batch.balance.choose(self.layer, routed.ids_TK)
        if ids_TK is not routed.ids_TK:
            routed = self.route(logits_TE, ids_TK)
        weights_TK = batch.balance.apply(self.layer, logits_TE, routed.scores_TE, ids_TK, routed.weights_TK)
        return Routing(ids_TK, weights_TK)

    def route(self, logits_TE: Tensor, ids_TK: Tensor | None) -> Routed:
        """Scores, choice and weights as the config says; the choice is `ids_TK` if given."""
        config = self.config
        grouped = config.routing == "group_limited_greedy"
        routed: Routed = self.ops.route(
            logits_TE,
            config.top_k,
            groups=config.num_groups if grouped else 1,
            groups_kept=config.groups_kept if grouped else 1,
            renormalise=False,
            scale=config.routed_scaling,
            ids_TK=ids_TK,
        )
        return routed


class MoE(nn.Module):
    """Routed experts and the shared ones, which read the same normed input (sec. 2.2.1)."""

    def __init__(self, config: DeepseekV2Config, layer: int, experts: range, ops: Ops) -> None:
        super().__init__()
        D, F = config.hidden_size, config.expert_size
        self.gate = Router(config, layer, ops)
        self.experts = Experts(len(experts), D, F, ops)
        shared = config.num_shared_experts
        self.shared_experts = SwiGLU(D, F * shared) if shared else None


class DecoderLayer(nn.Module):
    """x += attention(norm x); x += ffn(norm x), in the stages of `protocol.Layer`."""

    def __init__(self, config: DeepseekV2Config, layer: int, experts: range, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.is_moe = is_moe_layer(config, layer)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.self_attn = LatentAttention(config, ops)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.mlp: MoE | SwiGLU = (
            MoE(config, layer, experts, ops)
            if self.is_moe
            else SwiGLU(config.hidden_size, config.intermediate_size)
        )

    def attend(self, hidden_TD: Tensor, batch: Batch) -> tuple[Tensor, Routing | None, Carry]:
        """Stage 1: attention, the shared experts and the choice of experts."""
        residual_TD = hidden_TD + self.self_attn(self.input_layernorm(hidden_TD), batch)
        tokens_TD = self.post_attention_layernorm(residual_TD)
        if not isinstance(self.mlp, MoE):
            return tokens_TD, None, Carry(residual_TD)
        routing = self.mlp.gate(tokens_TD, batch)
        if self.mlp.shared_experts is not None:
            residual_TD = residual_TD + self.mlp.shared_experts(tokens_TD)
        return tokens_TD, routing, Carry(residual_TD)

    def experts(self, rows_RD: Tensor, counts_E: Tensor | None) -> Tensor:
        """Stage 3: the experts held here, or the dense FFN."""
        out_RD: Tensor
        out_RD = self.mlp.experts(rows_RD, counts_E) if isinstance(self.mlp, MoE) else self.mlp(rows_RD)
        return out_RD

    def aggregate(self, rows: Tensor, routing: Routing | None, carry: Carry) -> Tensor:
        """Stage 5: residual + Σ_k weight·row."""
        if routing is None:
            return carry.residual_TD + rows
        out_TD: Tensor = self.ops.combine(rows, routing.weights_TK, carry.residual_TD)
        return out_TD

    def forward(self, hidden_TD: Tensor, batch: Batch, dispatcher: Dispatcher) -> Tensor:
        """The five stages back to back, [T,D] → [T,D]."""
        return run_layer(self, hidden_TD, batch, dispatcher)


class DeepseekV2(CausalLM[DeepseekV2Config]):
    """The causal language model; see `CausalLM` for what the engine calls."""

    def layer(self, index: int, experts: range, ops: Ops) -> DecoderLayer:
        """The decoder layer with global number `index`."""
        return DecoderLayer(self.config, index, experts, ops)

    @staticmethod
    def needs(config: DeepseekV2Config) -> dict[str, Need]:
        """What this model asks of the operations whose implementations differ in ability."""
        key = config.qk_nope_head_dim + config.qk_rope_head_dim
        features = {"packed"} if key == config.v_head_dim else {"packed", "unequal_widths"}
        return {
            "attention": Need(frozenset(features), {"key": key, "value": config.v_head_dim}),
            "grouped_mm": Need(widths={"hidden_size": config.hidden_size, "expert_size": config.expert_size}),
        }
