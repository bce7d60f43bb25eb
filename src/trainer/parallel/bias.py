"""Bias-based balancing: experts that got too few rows become easier to choose (ENG-25).

After each applied update, with c the rows per expert over the global batch, b_i += rate · sign(mean c − c_i)
(arXiv 2408.15664, alg. 1). The bias has no gradient and no optimizer, and stands apart from the loss. It is
not centred: only differences enter the choice. Letters: M MoE layers of the model, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from src.models.decoder_layer import Router


class RouterBias:
    """The biases of all routers of the model in one tensor, whose rows the routers of this rank read."""

    def __init__(
        self, layers: nn.Module, moe_layers: Sequence[int], experts: int, rate: float, like: Tensor
    ) -> None:
        """Lend each router of `layers`, named by global number, its row; `like` has the dtype and device."""
        self._rate = rate
        self._bias_ME = like.new_zeros(len(moe_layers), experts)
        self.held: dict[str, Tensor] = {}
        """Mesh-free name of the buffer → bias [E] of a router of this rank; a view."""
        row_of = dict(zip(moe_layers, self._bias_ME, strict=True))
        for layer, name, router in routers(layers):
            router.e_score_correction_bias = self.held[f"{name}.e_score_correction_bias"] = row_of[layer]

    @torch.no_grad()
    def finish(self, counts_ME: Tensor, skip: Tensor) -> None:
        """Move every bias by the step's counts, summed over all data ranks, unless `skip` is above 0.

        In integers, so that the sign is exact; layers of other stages count 0 everywhere and stay.
        """
        experts = counts_ME.shape[1]
        below_ME = (counts_ME.sum(1, keepdim=True) - experts * counts_ME).sign()
        moved_ME = self._bias_ME + self._rate * below_ME.to(self._bias_ME.dtype)
        self._bias_ME.copy_(torch.where(skip > 0, self._bias_ME, moved_ME))

    def largest(self) -> Tensor:
        """Largest absolute bias of this rank's layers, a device scalar."""
        return self._bias_ME.abs().max() if self._bias_ME.numel() else self._bias_ME.new_zeros(())


def routers(layers: nn.Module) -> Iterator[tuple[int, str, Router]]:
    """Global number of the layer, name in the model, and router of each layer that has one."""
    for index, layer in layers.named_children():
        for name, module in layer.named_modules(prefix=f"model.layers.{index}"):
            if isinstance(module, Router):
                yield int(index), name, module
