"""What every decoder family shares around its layers, and all that the engine calls of a model."""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from src.kernels.declaration import Need
from src.kernels.dtypes import accumulate, widen
from src.kernels.registry import Ops
from src.models.layers import Embedding, Linear, RMSNorm, Rotary
from src.models.names import vocabulary
from src.models.protocol import Batch, Dispatcher
from src.models.schema import ModelConfig
from src.models.stage import Stage

C = TypeVar("C", bound=ModelConfig)


class Decoder(nn.Module):
    """The parts that a stage holds: embedding, layers by global number, final norm."""

    def __init__(self, config: ModelConfig, stage: Stage, layers: dict[str, nn.Module], ops: Ops) -> None:
        super().__init__()
        if stage.first:
            self.embed_tokens = Embedding(vocabulary(config), config.hidden_size)
        self.layers = nn.ModuleDict(layers)
        if stage.last:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)


class CausalLM(nn.Module, Generic[C]):
    """One stage of a causal language model; `named_parameters()` gives the names of `names.parameters`.

    Raises `ValueError` if embedding and head are tied but the stage holds one of them only.
    """

    def __init__(self, config: C, stage: Stage, ops: Ops) -> None:
        super().__init__()
        if config.tie_embeddings and stage.first != stage.last:
            raise ValueError("tie_embeddings=true needs embedding and head on one stage: set mesh.pp=1")
        self.config, self.stage, self.ops = config, stage, ops
        layers = {str(index): self.layer(index, stage.experts, ops) for index in stage.layers}
        self.model = Decoder(config, stage, layers, ops)
        if stage.last:
            self.lm_head = Linear(config.hidden_size, vocabulary(config))
            if config.tie_embeddings:
                self.lm_head.weight = self.model.embed_tokens.weight

    @abstractmethod
    def layer(self, index: int, experts: range, ops: Ops) -> nn.Module:
        """The decoder layer with global number `index`, holding the experts with these global ids."""

    @staticmethod
    @abstractmethod
    def needs(config: C) -> dict[str, Need]:
        """What the family asks of the operations whose implementations differ in ability (REG-2)."""

    def forward(self, x: Tensor, batch: Batch, dispatcher: Dispatcher) -> Tensor:
        """Ids int64 [B,S] on the first stage, else hidden [B,S,D] → hidden [B,S,D], normed on the last."""
        hidden_TD: Tensor = (self.model.embed_tokens(x) if self.stage.first else x).flatten(0, 1)
        for name, layer in self.model.layers.items():
            seen = batch.at(int(name)) if layer.is_moe else batch
            hidden_TD = layer(hidden_TD, seen, dispatcher)
        if self.stage.last:
            hidden_TD = self.model.norm(hidden_TD)
        B, S = batch.positions_BS.shape
        return hidden_TD.view(B, S, self.config.hidden_size)

    def loss(self, hidden_BSD: Tensor, labels_BS: Tensor, scale: Tensor) -> Tensor:
        """scale·Σ cross-entropy over labels ≠ −100, a scalar, fp32 at least; `scale` a scalar tensor."""
        loss: Tensor = self.ops.linear_cross_entropy(
            hidden_BSD.flatten(0, 1), self.lm_head.weight, labels_BS.flatten(), scale
        )
        return loss

    def logits(self, hidden_BSD: Tensor) -> Tensor:
        """[B,S,D] → [B,S,V], fp32 at least."""
        return F.linear(widen(hidden_BSD), widen(self.lm_head.weight))

    def reset_buffers(self, device: torch.device) -> None:
        """Recompute the tables that are not saved, in the parameters' dtype but fp32 at least (TRAP-7)."""
        dtype = accumulate(next(self.parameters()).dtype)
        for module in self.modules():
            if isinstance(module, Rotary):
                module.reset_buffers(device, dtype)
