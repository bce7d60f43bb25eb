"""The decoder layer of most families: router, experts or a dense FFN, and the layer cut in its stages.

A family gives its attention, its routing rule and its shared expert, if it has one. Letters as in `protocol`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from src.kernels.registry import Ops
from src.kernels.route import Routed
from src.kernels.sort_by_expert import Order
from src.models.layers import ROUTER, ROUTER_BIAS, Experts, ParamSpec, RMSNorm, SwiGLU
from src.models.protocol import Batch, Carry, Dispatcher, Routing, run_layer
from src.models.schema import ModelConfig, MoeConfig


@dataclass(frozen=True)
class RoutingRule:
    """How the K experts of a token and their weights follow from its scores; see `kernels.route`."""

    groups: int = 1
    """Groups that the experts stand in; 1 limits nothing."""
    groups_kept: int = 1
    """Groups that a token may choose from."""
    renormalise: bool = False
    """Whether the weights of a token sum to `scale`."""
    scale: float = 1.0
    """Factor on the weights."""
    scoring: str = "softmax"
    """`softmax` over all experts, or `softmax_of_chosen`: over the K with the largest logits."""


class Router(nn.Module):
    """Chooses K experts of each token and their weights."""

    specs: ClassVar[dict[str, ParamSpec]] = {"weight": ROUTER, "bias": ROUTER_BIAS}
    e_score_correction_bias: Tensor | None
    """[E], fp32 at least, added to the scores for the choice alone; the engine lends it (`balance=bias`)."""

    def __init__(self, config: MoeConfig, rule: RoutingRule, ops: Ops, bias: bool = False) -> None:
        super().__init__()
        self.top_k, self.rule, self.ops = config.top_k, rule, ops
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if bias else None
        self.register_buffer("e_score_correction_bias", None)

    def forward(self, x_TD: Tensor, batch: Batch) -> Routing:
        """Ids and weights [T,K]; ids may come with the batch, and its balance adds to the gradient."""
        logits_TE = self.ops.router_linear(x_TD, self.weight)
        if self.bias is not None:
            logits_TE = logits_TE + self.bias
        routed = self.route(logits_TE, batch.ids_TK)
        if batch.balance is None:
            return Routing(routed.ids_TK, routed.weights_TK)
        weights_TK = batch.balance.apply(logits_TE, routed.scores_TE, routed.ids_TK, routed.weights_TK)
        return Routing(routed.ids_TK, weights_TK)

    def route(self, logits_TE: Tensor, ids_TK: Tensor | None) -> Routed:
        """Scores, choice and weights as the rule says; the choice is `ids_TK` if given."""
        rule = self.rule
        routed: Routed = self.ops.route(
            logits_TE,
            self.top_k,
            groups=rule.groups,
            groups_kept=rule.groups_kept,
            renormalise=rule.renormalise,
            scale=rule.scale,
            scoring=rule.scoring,
            bias_E=self.e_score_correction_bias,
            ids_TK=ids_TK,
        )
        return routed


class MoE(nn.Module):
    """Routed experts, and a shared one that reads the same normed input."""

    def __init__(self, router: Router, experts: Experts, shared: SwiGLU | None = None) -> None:
        """`experts` are those held here."""
        super().__init__()
        self.gate = router
        self.experts = experts
        self.shared_experts = shared


class DecoderLayer(nn.Module):
    """x += attention(norm x); x += ffn(norm x), in the stages of `protocol.Layer`."""

    def __init__(self, config: ModelConfig, attention: nn.Module, mlp: MoE | SwiGLU, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.is_moe = isinstance(mlp, MoE)
        self.is_fused = self.is_moe and ops.fuses_experts
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.mlp = mlp

    def attend(self, hidden_TD: Tensor, batch: Batch) -> tuple[Tensor, Routing | None, Carry]:
        """Stage 1: attention, the shared experts and the choice of experts."""
        attended_TD = self.self_attn(self.input_layernorm(hidden_TD), batch)
        tokens_TD, residual_TD = self.post_attention_layernorm.join(attended_TD, hidden_TD)
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

    def aggregate(
        self, rows: Tensor, routing: Routing | None, carry: Carry, home_TK: Tensor | None = None
    ) -> Tensor:
        """Stage 5: residual + Σ_k weight·row."""
        if routing is None:
            return carry.residual_TD + rows
        out_TD: Tensor = self.ops.combine(rows, home_TK, routing.weights_TK, carry.residual_TD)
        return out_TD

    def local(self, tokens_TD: Tensor, routing: Routing, carry: Carry, order: Order) -> Tensor:
        """Stages 2 to 5 as one operation, where all experts are here."""
        assert isinstance(self.mlp, MoE)
        experts, weights_TK = self.mlp.experts, routing.weights_TK
        out_TD: Tensor = self.ops.local_experts(
            tokens_TD, weights_TK, carry.residual_TD, order, experts.gate_up, experts.down
        )
        return out_TD

    def forward(self, hidden_TD: Tensor, batch: Batch, dispatcher: Dispatcher) -> Tensor:
        """The five stages back to back, [T,D] → [T,D]."""
        return run_layer(self, hidden_TD, batch, dispatcher)
