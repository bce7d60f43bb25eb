"""The device on which operations are timed: random inputs there, and which implementations may run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from src.config import DeterminismConfig, KernelsConfig
from src.kernels.declaration import Device, Implementation, Need
from src.kernels.registry import Ops, choose, describe, implementations

Key = tuple[str, str]
"""Operation and implementation."""


@dataclass(frozen=True)
class Place:
    """Where operations are measured, and by what draws."""

    device: torch.device
    dtype: torch.dtype
    draws: torch.Generator

    @cached_property
    def described(self) -> Device:
        """The device as declarations of implementations speak of it."""
        return describe(self.device)

    @property
    def compiles(self) -> bool:
        """Whether training compiles its layers here, which is what `backend.compile=auto` says."""
        return self.device.type == "cuda"

    def normal(self, *sizes: int, std: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Random numbers; of zeros products are faster than of anything else."""
        out = torch.empty(*sizes, device=self.device, dtype=dtype or self.dtype)
        return out.normal_(0, std, generator=self.draws)

    def leaf(self, *sizes: int, std: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """As `normal`, with a gradient."""
        return self.normal(*sizes, std=std, dtype=dtype).requires_grad_()

    def ops(self, kernels: KernelsConfig | None = None, needs: Mapping[str, Need] | None = None) -> Ops:
        """What a model that asks for `needs` would run here; `kernels=auto` if nothing is said."""
        wanted = kernels or KernelsConfig()
        return choose(wanted, self.described, self.dtype, DeterminismConfig(), needs or {})

    def split(
        self, operation: str, need: Need | None = None
    ) -> tuple[dict[str, Implementation], dict[Key, str]]:
        """The implementations that may run here by name, and why the others may not."""
        there, missing = {}, {}
        for name, known in implementations()[operation].items():
            why = known.missing(self.described, self.dtype, need or Need(), bitwise=False)
            if why is None:
                there[name] = known
            else:
                missing[operation, name] = why
        return there, missing

    def auto(self, operation: str, need: Need | None = None) -> str:
        """The implementation that `kernels=auto` takes here."""
        return self.ops(needs={operation: need or Need()}).choices[operation].name

    def as_trained(self, call: Callable[..., Any], known: Implementation) -> tuple[Callable[..., Any], bool]:
        """`call` with the implementation before its inputs, and whether a compiler has it, as in training.

        The compiler looks into plain torch alone: kernels of others and of ours are opaque to it.
        """
        function = known.function

        def whole(inputs: Any) -> Any:
            return call(function, inputs)

        if not self.compiles or known.source != "torch":
            return whole, False
        return torch.compile(whole, fullgraph=True, dynamic=False), True


def place() -> Place:
    """The GPU in bf16 if there is one, else the CPU in fp32."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    draws = torch.Generator(device).manual_seed(1)
    return Place(device, torch.bfloat16 if kind == "cuda" else torch.float32, draws)
