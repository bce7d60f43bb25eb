"""The weights in fp8, beside those that compute: made once a step, lent to the layers (FP8-1, FP8-5).

They follow the weights as the bf16 copies of masters follow these. What is read is the whole weight, gathered
where it is sharded, so that every rank of a mesh has the same scales and the same numbers (law 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from src.config import Config, PrecisionConfig
from src.errors import Problem, UserError
from src.kernels.declaration import EAGER
from src.kernels.fp8 import Quantised
from src.kernels.registry import Ops
from src.models.build import CausalLM
from src.models.layers import Experts, Linear

Quantise = Callable[[Tensor, bool, Quantised | None], Quantised]


class QuantisedWeights:
    """The fp8 copies of a rank, and whether they are those of the weights as they are now."""

    def __init__(self, model: CausalLM[Any], config: PrecisionConfig, quantise: Quantise) -> None:
        """Of projections, shared experts and dense FFNs of all layers, and of routed experts if `config` says
        so; `quantise` is the operation `quantise_weight`."""
        parts = list(model.model.layers.modules())
        self._linears = [part for part in parts if isinstance(part, Linear)]
        self._experts = [part for part in parts if isinstance(part, Experts)]
        if config.fp8 == "dense":
            self._experts = []
        self._quantise, self._by_rows = quantise, config.fp8_recipe == "row"
        self._is_stale = True

    def touch(self) -> None:
        """Note that the weights are about to be written to, by an update or by others."""
        self._is_stale = True

    @torch.no_grad()
    def refresh(self, gather: Callable[[], None]) -> None:
        """Quantise anew if the weights were written to; `gather` makes them whole."""
        if not self._is_stale:
            return
        gather()
        for linear in self._linears:  # Into the same memory again, which compiled layers go on reading.
            linear.fp8 = self._quantise(linear.weight, self._by_rows, linear.fp8)
        for experts in self._experts:
            gate_up, down = experts.fp8 or (None, None)
            gate_up = self._quantise(experts.gate_up, True, gate_up)
            experts.fp8 = gate_up, self._quantise(experts.down, True, down)
        self._is_stale = False


def check_fp8(config: Config, ops: Ops, compute: torch.dtype) -> None:
    """Refuse fp8 where no product runs in it, unless the reference was asked for.

    Raises:
        UserError: with all that is missing (3).
    """
    asked = {"none": (), "dense": ("linear_fp8",), "dense_experts": ("linear_fp8", "grouped_mm_fp8")}
    key, fp8 = "precision.fp8", config.precision.fp8
    problems = []
    if fp8 != "none" and compute != torch.bfloat16:
        message = f"{fp8}, but precision={config.precision.name} computes in {compute} here"
        fix = "precision=master, precision=split or precision=bf16"
        problems.append(Problem(key, message, fix, "FP8-1"))
    for operation in asked[fp8]:
        choice, wanted = ops.choices[operation], getattr(config.kernels, operation)
        is_emulated = ops.device.kind != "cpu" and choice.name == EAGER
        if is_emulated and EAGER not in (wanted, config.kernels.name):
            why = "; ".join(f"{name} {reason}" for name, reason in choice.refused.items())
            fix = f"precision.fp8=none, or kernels.{operation}=eager, which is slower than bf16"
            problems.append(Problem(key, f"{fp8}, but no such product runs here: {why}", fix, "FP8-1"))
    if problems:
        raise UserError(problems, code=3)
