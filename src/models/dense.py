"""The dense twin (DENSE-1): a decoder like Llama's (arXiv 2302.13971), every layer with a SwiGLU, no experts.

What mixtures are compared with. Attention is that of `qwen3_moe` without its norms of queries and keys.
"""

from __future__ import annotations

from src.kernels.declaration import Need
from src.kernels.registry import Ops
from src.models.causal_lm import CausalLM
from src.models.decoder_layer import DecoderLayer
from src.models.layers import SwiGLU
from src.models.qwen3_moe import GroupedAttention, attention_need
from src.models.schema import DenseConfig


class Dense(CausalLM[DenseConfig]):
    """The causal language model; see `CausalLM` for what the engine calls."""

    def layer(self, index: int, experts: range, ops: Ops) -> DecoderLayer:
        """A decoder layer; all are alike, and `experts` is empty."""
        config = self.config
        mlp = SwiGLU(config.hidden_size, config.intermediate_size, ops)
        return DecoderLayer(config, GroupedAttention(config, ops, normed=False), mlp, ops)

    @staticmethod
    def needs(config: DenseConfig) -> dict[str, Need]:
        """What this model asks of the operations whose implementations differ in ability."""
        return {"attention": attention_need(config)}
