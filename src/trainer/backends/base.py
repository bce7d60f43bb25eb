"""What the loop, checkpoints, evaluation and samples need of a backend, whichever runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from src.config import Config
from src.kernels.registry import Ops
from src.models.build import ParamSpec
from src.trainer.data.batch import MicroBatch, StepBatch
from src.trainer.parallel.shards import LocalEntry
from src.trainer.ranges import Ranges
from src.trainer.runtime import Runtime


@dataclass(frozen=True)
class Sums:
    """Device values of a step, local parts whose SUM over all ranks is the global value."""

    loss: Tensor
    """Σ cross entropy / N_tok."""
    aux: Tensor
    """Σ over MoE layers of the auxiliary measure, without its coefficient; 1 a layer is even routing."""
    z: Tensor
    """Σ over MoE layers of mean squared logsumexp."""
    counts: Tensor | None
    """int64 rows per expert of real tokens [MoE layers of the model, E]; zero in layers of other stages. None
    where the backend does not see them."""


class Backend(Protocol):
    """Model, parallelism and step of one rank."""

    @classmethod
    def build(cls, config: Config, runtime: Runtime) -> Self:
        """This rank's part of the model with its initial weights.

        Raises:
            UserError: a kernel or a package that the config names is not available here (3).
        """
        ...

    @classmethod
    def choose_ops(cls, config: Config, device: torch.device) -> Ops:
        """The implementation of each operation, as `build` takes them; `UserError` (3) as there."""
        ...

    @property
    def specs(self) -> Mapping[str, ParamSpec]:
        """Module name → how the parameter starts and is treated."""
        ...

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Module name → this rank's parameter: a plain tensor, or a DTensor where sharded."""
        ...

    @property
    def moe_layers(self) -> list[int]:
        """Global indices of the layers with experts; the rows of `Sums.counts`."""
        ...

    @property
    def ops(self) -> Ops:
        """The chosen implementation of each operation."""
        ...

    @property
    def copies(self) -> Mapping[str, Tensor]:
        """Module name → tensor in the compute dtype that every update brings up to its parameter."""
        ...

    @property
    def remainders(self) -> Mapping[str, Tensor]:
        """Module name → int16 lower half of this rank's part of a parameter that is an upper half."""
        ...

    @property
    def compiled(self) -> str:
        """What of the model is one graph on this device: `none`, `layers` or `model`."""
        ...

    def forward_backward(self, batch: StepBatch, n_tokens: Tensor) -> Sums:
        """All micro-batches of a step; leaves the gradients, reduced by SUM, in `.grad` of `parameters`.

        `n_tokens` is the int64 device scalar of the labels of the global batch (ENG-4).
        """
        ...

    def norm_and_loss(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Global L2 norm of all gradients and global loss, of which `loss` is this rank's part (ENG-6).

        Device scalars, equal on all ranks; the norm is not finite if the loss is not (ENG-27).
        """
        ...

    def finish_step(self, skip: Tensor) -> None:
        """Take over what a step leaves for the next one, unless `skip` is above 0 on the device."""
        ...

    def largest_bias(self) -> Tensor | None:
        """Largest |bias| of this rank's routers, a device scalar; None without `balance=bias` (ENG-25)."""
        ...

    def evaluate(self, micro_batch: MicroBatch) -> Tensor:
        """Σ cross entropy of a micro-batch, a device scalar; 0 except on the last stage. Counts nothing."""
        ...

    def logits(self, ids_BS: Tensor) -> Tensor:
        """Logits [B,S,V] of full documents, on every rank; every rank calls it with the same ids."""
        ...

    def ops_record(self) -> dict[str, Any]:
        """What `kernels.json` says; equal on all ranks."""
        ...

    def annotate(self, ranges: Ranges | None) -> None:
        """Name layers and stages in a trace from now on, or no more, where the backend sees them."""
        ...

    def local_entries(self, tensors: Mapping[str, Tensor] | None = None) -> Mapping[str, LocalEntry]:
        """Canonical name → what this rank holds of it, in its parameters or in tensors shaped like them."""
        ...

    def extra_state(self) -> Mapping[str, Tensor]:
        """Small tensors to save beside the parameters, by mesh-free name; equal on all ranks of a stage."""
        ...

    def load_extra_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy back what `extra_state` gave, on any mesh and from any backend."""
        ...
