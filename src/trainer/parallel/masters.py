"""Master weights of a rank that shares nothing: the model computes in bf16, the update is on fp32 masters.

Where parameters are sharded, FSDP2 keeps the masters and casts them; for one rank alone its gathers and
reductions would be four copies of the model a step for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from src.models.build import ParamSpec
from src.trainer.parallel.precision import Precision


def cast_for_compute(model: nn.Module, specs: Mapping[str, ParamSpec], precision: Precision) -> None:
    """Store the parameters in the compute dtype, those that are `wide` (the router) in the masters'."""
    for name, parameter in model.named_parameters():
        wide = specs[name].wide
        parameter.data = parameter.data.to(precision.parameters if wide else precision.compute)


class Masters:
    """The masters of a model's parameters, and the way there and back.

    A master is the parameter itself if that has its dtype; else an fp32 copy; or under `precision=split` the
    parameter as its upper half, once more and with a gradient of its own.
    """

    def __init__(self, model: nn.Module, precision: Precision, accumulate: Callable[..., Tensor]) -> None:
        """`accumulate` is the operation of that name."""
        self._accumulate, self._dtype, self._is_split = accumulate, precision.parameters, precision.is_split
        self._held = dict(model.named_parameters())
        self.parameters: dict[str, nn.Parameter] = {name: self._master(p) for name, p in self._held.items()}
        """Module name → what the optimizer updates and checkpoints hold."""
        self._pairs = [(p, self.parameters[n]) for n, p in self._held.items() if p is not self.parameters[n]]
        for _, master in self._pairs:
            master.grad_dtype = None  # A gradient may come in another dtype.
        self._is_stale = True

    def _master(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.dtype == self._dtype:
            return parameter
        if self._is_split:
            return nn.Parameter(parameter.detach())
        return nn.Parameter(torch.empty_like(parameter, dtype=self._dtype))

    @property
    def copies(self) -> dict[str, Tensor]:
        """Module name → the tensor in the compute dtype that follows the master of that name."""
        if self._is_split:
            return {}
        return {name: p.detach() for name, p in self._held.items() if p is not self.parameters[name]}

    def touch(self) -> None:
        """Note that the masters are about to be written to by others than the optimizer."""
        self._is_stale = True

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the model's weights up to date, if the masters were written to."""
        if self._is_stale and self.copies:
            torch._foreach_copy_([p for p, _ in self._pairs], [m for _, m in self._pairs])
        self._is_stale = False

    @torch.no_grad()
    def collect(self, only: bool) -> None:
        """Move the gradients of a micro-batch to the masters, summed there in their dtype (ENG-15).

        The gradient of the `only` micro-batch is moved as it is: it is exact in the dtype it was computed in.
        """
        for parameter, master in self._pairs:
            gradient: Tensor | None = parameter.grad
            parameter.grad = None
            if gradient is None:
                continue
            master.grad = gradient if only else self._accumulate(master.grad, gradient, self._dtype)
