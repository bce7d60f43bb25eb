"""What every decoder family shares around its layers, and all that the engine calls of a model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
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
from src.models.stage import Holding, Stage

C = TypeVar("C", bound=ModelConfig)
Around = Callable[[int, Callable[..., Tensor]], Callable[..., Tensor]]


class Decoder(nn.Module):
    """The parts that a rank holds: embedding, layers by global number, final norm."""

    def __init__(self, config: ModelConfig, holding: Holding, layers: dict[str, nn.Module], ops: Ops) -> None:
        super().__init__()
        if holding.first:
            self.embed_tokens = Embedding(vocabulary(config), config.hidden_size)
        self.layers = nn.ModuleDict(layers)
        if holding.last:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)


class CausalLM(nn.Module, Generic[C]):
    """What a rank holds of a causal language model; `named_parameters()` gives names of `names.parameters`.

    Raises `ValueError` if embedding and head are tied but only one of them is held.
    """

    def __init__(self, config: C, holding: Holding, ops: Ops) -> None:
        super().__init__()
        if config.tie_embeddings and holding.first != holding.last:
            raise ValueError("tie_embeddings=true needs embedding and head on one rank: set mesh.pp=1")
        self.config, self.holding, self.ops = config, holding, ops
        layers = {str(index): self.layer(index, holding.experts, ops) for index in holding.layers}
        self.model = Decoder(config, holding, layers, ops)
        self.around: Around | None = None
        """What the engine puts around the call of each layer, given its number, while it is traced."""
        if holding.last:
            self.lm_head = Linear(config.hidden_size, vocabulary(config), ops)
            if config.tie_embeddings:
                self.lm_head.weight = self.model.embed_tokens.weight

    @abstractmethod
    def layer(self, index: int, experts: range, ops: Ops) -> nn.Module:
        """The decoder layer with global number `index`, holding the experts with these global ids."""

    @staticmethod
    @abstractmethod
    def needs(config: C) -> dict[str, Need]:
        """What the family asks of the operations whose implementations differ in ability (REG-2)."""

    def forward(self, x: Tensor, batch: Batch, dispatcher: Dispatcher, stage: Stage | None = None) -> Tensor:
        """Ids int64 [B,S] on the first stage, else hidden [B,S,D] → hidden [B,S,D], normed on the last.

        `stage` says which of those held; it may be left out where there is one.
        """
        if stage is None:
            (stage,) = self.holding.stages
        hidden_TD = self.enter(x, stage.first)
        for index in stage.layers:
            layer = self.model.layers[str(index)]
            call = layer if self.around is None else self.around(index, layer)
            hidden_TD = call(hidden_TD, batch.at(index) if layer.is_moe else batch, dispatcher)
        return self.leave(hidden_TD, batch, stage)

    def enter(self, x: Tensor, first: bool) -> Tensor:
        """What the first of a stage's layers takes, [T,D]: the embedding of ids [B,S], or hidden [B,S,D]."""
        hidden_BSD: Tensor = self.model.embed_tokens(x) if first else x
        return hidden_BSD.flatten(0, 1)

    def leave(self, hidden_TD: Tensor, batch: Batch, stage: Stage) -> Tensor:
        """What a stage sends on, [B,S,D], normed on the last."""
        if stage.last:
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
