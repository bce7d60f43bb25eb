"""The device on which operations are timed: random inputs there, and which implementations may run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from src.kernels.declaration import EAGER, Device, Need
from src.kernels.registry import AUTO, describe, implementations

Key = tuple[str, str]
"""Operation and implementation."""


@dataclass(frozen=True)
class Place:
    """Where operations are measured, and by what draws."""

    device: torch.device
    dtype: torch.dtype
    draws: torch.Generator

    @property
    def described(self) -> Device:
        """The device as declarations of implementations speak of it."""
        return describe(self.device)

    def normal(self, *sizes: int, std: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Random numbers; of zeros products are faster than of anything else."""
        out = torch.empty(*sizes, device=self.device, dtype=dtype or self.dtype)
        return out.normal_(0, std, generator=self.draws)

    def leaf(self, *sizes: int, std: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """As `normal`, with a gradient."""
        return self.normal(*sizes, std=std, dtype=dtype).requires_grad_()

    def split(self, operation: str, need: Need | None = None) -> tuple[dict[str, Any], dict[Key, str]]:
        """Functions of the implementations that may run here by name, and why the others may not."""
        functions, missing = {}, {}
        for name, known in implementations()[operation].items():
            why = known.missing(self.described, self.dtype, need or Need(), bitwise=False)
            if why is None:
                functions[name] = known.function
            else:
                missing[operation, name] = why
        return functions, missing

    def chosen(self, operation: str, need: Need | None = None) -> Callable[..., Any]:
        """The function that `kernels=auto` runs here."""
        functions, _ = self.split(operation, need)
        order = (*AUTO.get(self.described.kind, {}).get(operation, ()), EAGER)
        function: Callable[..., Any] = functions[next(name for name in order if name in functions)]
        return function


def place() -> Place:
    """The GPU in bf16 if there is one, else the CPU in fp32."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    draws = torch.Generator(device).manual_seed(1)
    return Place(device, torch.bfloat16 if kind == "cuda" else torch.float32, draws)
