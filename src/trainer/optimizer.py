"""The update, on the shards that this rank holds.

AdamW and SGD work element by element, so they run on local tensors: parameters of different meshes (experts
and dense ones) need no grouping, and no DTensor operation is dispatched. Moments exist from the start, since
a checkpoint is loaded into tensors that are there (CKPT-3).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from src.config import OptimizerConfig
from src.models.build import ParamSpec

MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that lies on this rank; a plain tensor itself. Shares storage, no gradient."""
    to_local = getattr(tensor, "to_local", None)
    return (tensor if to_local is None else to_local()).detach()


class Optimizer:
    """AdamW or SGD over named parameters, skipping a bad step on the device (ENG-27)."""

    def __init__(
        self, config: OptimizerConfig, parameters: Mapping[str, Tensor], specs: Mapping[str, ParamSpec]
    ) -> None:
        self._config = config
        self._parameters = {name: p for name, p in parameters.items() if local(p).numel()}
        self._locals = {name: local(p) for name, p in self._parameters.items()}
        decayed = [t for name, t in self._locals.items() if specs[name].decay]
        plain = [t for name, t in self._locals.items() if not specs[name].decay]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self._torch = _torch_optimizer(config, [g for g in groups if g["params"]])
        self._create_state()

    def _create_state(self) -> None:
        for tensor in self._locals.values():
            state: dict[str, Tensor] = {m: torch.zeros_like(tensor) for m in self._moment_names}
            if self._config.kind == "adamw":
                state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
            self._torch.state[tensor] = state

    @property
    def _moment_names(self) -> tuple[str, ...]:
        if self._config.kind == "sgd" and not self._config.momentum:
            return ()
        return MOMENTS[self._config.kind]

    @property
    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Moment name → parameter name → this rank's shard of it."""
        return {
            m: {name: self._torch.state[t][m] for name, t in self._locals.items()} for m in self._moment_names
        }

    @property
    def updates(self) -> int:
        """Updates applied so far; reads the device."""
        for tensor in self._locals.values():
            if "step" in self._torch.state[tensor]:
                return int(self._torch.state[tensor]["step"].item())
        return 0

    @updates.setter
    def updates(self, value: int) -> None:
        for tensor in self._locals.values():
            if "step" in self._torch.state[tensor]:
                self._torch.state[tensor]["step"].fill_(value)

    @torch.no_grad()
    def step(self, lr: float, clip: Tensor | None, skip: Tensor) -> None:
        """Apply one update.

        Args:
            lr: learning rate of this step.
            clip: device scalar that multiplies every gradient, or None.
            skip: device scalar, 1.0 leaves parameters, moments and step count untouched, else 0.0.
        """
        for name, parameter in self._parameters.items():
            assert parameter.grad is not None, f"{name} has no gradient"
            self._locals[name].grad = local(parameter.grad)
        if clip is not None:
            gradients = [t.grad for t in self._locals.values() if t.grad is not None]
            torch._foreach_mul_(gradients, clip)
        for group in self._torch.param_groups:
            group["lr"] = lr
        self._torch.found_inf = skip.to(torch.float32)  # type: ignore[attr-defined]
        self._torch.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for name, parameter in self._parameters.items():
            parameter.grad = None
            self._locals[name].grad = None


def _torch_optimizer(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if config.kind == "adamw":
        betas = (config.betas[0], config.betas[1])
        return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)


def clip_factor(norm: Tensor, max_norm: float | None) -> Tensor | None:
    """min(1, max_norm / (norm + 1e-6)) as a device scalar (ENG-7); None if nothing is clipped."""
    return None if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
