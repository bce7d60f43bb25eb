"""The update, on the shards that this rank holds.

AdamW and SGD work element by element, so they run on local tensors: parameters of different meshes (experts
and dense ones) need no grouping, and no DTensor operation is dispatched. A gradient is let go as soon as its
parameter is updated. Moments exist from the start, since a checkpoint is loaded into tensors that are there
(CKPT-3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim.sgd import sgd as torch_sgd

from src.config import OptimizerConfig
from src.kernels.adamw import Adam
from src.kernels.adamw import adamw as eager_adamw
from src.kernels.halves import join, keep
from src.models.build import ParamSpec

MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that lies on this rank; a plain tensor itself. Shares storage, no gradient."""
    to_local = getattr(tensor, "to_local", None)
    return (tensor if to_local is None else to_local()).detach()


class Optimizer:
    """AdamW or SGD over named parameters, skipping a bad step on the device (ENG-27)."""

    def __init__(
        self,
        config: OptimizerConfig,
        parameters: Mapping[str, Tensor],
        specs: Mapping[str, ParamSpec],
        adamw: Callable[..., None] = eager_adamw,
        copies: Mapping[str, Tensor] | None = None,
        remainders: Mapping[str, Tensor] | None = None,
        first_moment: torch.dtype | None = None,
    ) -> None:
        """Moments start at zero, in the dtype of the master.

        Args:
            config: the rule and its numbers.
            parameters: what is updated, by name.
            specs: which of them decay.
            adamw: the operation (OP-4).
            copies: tensors that follow the parameters of their names in another dtype.
            remainders: lower halves of the masters whose upper halves are the parameters of their names.
            first_moment: dtype of AdamW's first moment, if it is another.
        """
        self._config, self._adamw = config, adamw
        self._copies, self._remainders = copies or {}, remainders or {}
        self._parameters = {name: p for name, p in parameters.items() if local(p).numel()}
        self._locals = {name: local(p) for name, p in self._parameters.items()}
        self._decay = {name: config.weight_decay if specs[name].decay else 0.0 for name in self._locals}
        self.moments: dict[str, dict[str, Tensor]] = {
            moment: self._zeros(first_moment if moment == "exp_avg" else None)
            for moment in moment_names(config)
        }
        """Moment name → parameter name → this rank's shard of it."""
        device = next((t.device for t in self._locals.values()), torch.device("cpu"))
        self._updates = torch.zeros((), dtype=torch.float32, device=device)

    def _zeros(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """A tensor like each parameter, in `dtype` or in that of its master."""
        held = self._locals.items()
        wide = {name: torch.float32 if name in self._remainders else t.dtype for name, t in held}
        return {name: torch.zeros_like(t, dtype=dtype or wide[name]) for name, t in held}

    @property
    def updates(self) -> int:
        """Updates applied so far; reads the device."""
        return int(self._updates.item())

    @updates.setter
    def updates(self, value: int) -> None:
        self._updates.fill_(value)

    @torch.no_grad()
    def step(self, lr: float, clip: Tensor | None, skip: Tensor) -> None:
        """Apply one update.

        Args:
            lr: learning rate of this step.
            clip: device scalar that multiplies every gradient, or None.
            skip: device scalar, 1.0 leaves parameters, moments and step count untouched, else 0.0.
        """
        skip = skip.to(torch.float32)
        for name, parameter in self._parameters.items():
            assert parameter.grad is not None, f"{name} has no gradient"
        update = self._step_sgd if self._config.kind == "sgd" else self._step_adamw
        update(lr, clip, skip)
        self._updates += 1 - skip

    def _step_adamw(self, lr: float, clip: Tensor | None, skip: Tensor) -> None:
        betas = (self._config.betas[0], self._config.betas[1])
        adam = Adam(lr, betas, self._config.eps, self._updates, clip, skip)
        first, second = self.moments["exp_avg"], self.moments["exp_avg_sq"]
        for name, p in self._locals.items():
            gradient = local(self._take_grad(name))
            copy, low, decay = self._copies.get(name), self._remainders.get(name), self._decay[name]
            self._adamw(p, gradient, first[name], second[name], copy, decay, adam, low)

    def _step_sgd(self, lr: float, clip: Tensor | None, skip: Tensor) -> None:
        buffers = self.moments.get("momentum_buffer", {})
        for name, p in self._locals.items():
            low = self._remainders.get(name)
            master = p if low is None else join(p, low)
            gradient = local(self._take_grad(name)).to(master.dtype)
            gradient = gradient if clip is None else gradient.mul_(clip)
            torch_sgd(
                [master], [gradient], [buffers.get(name)], fused=True, found_inf=skip, lr=lr,
                weight_decay=self._decay[name], momentum=self._config.momentum, dampening=0.0,
                nesterov=False, maximize=False,
            )  # fmt: skip
            if name in self._copies:
                self._copies[name].copy_(p)
            if low is not None:
                keep(master, p, low)

    def _take_grad(self, name: str) -> Tensor:
        """The gradient, which is let go with the update of its parameter."""
        gradient = self._parameters[name].grad
        assert gradient is not None
        self._parameters[name].grad = None
        return gradient

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None


def moment_names(config: OptimizerConfig) -> tuple[str, ...]:
    """Tensors like a parameter that the rule keeps."""
    if config.kind == "sgd" and not config.momentum:
        return ()
    return MOMENTS[config.kind]


def clip_factor(norm: Tensor, max_norm: float | None) -> Tensor | None:
    """min(1, max_norm / (norm + 1e-6)) as a device scalar (ENG-7); None if nothing is clipped."""
    return None if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
