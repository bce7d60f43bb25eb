"""Dtypes of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from src.config import Config


@dataclass(frozen=True)
class Precision:
    """Dtypes of a precision policy."""

    parameters: torch.dtype
    """Of the parameters that are updated, the masters, and of gradients after their reduction."""
    compute: torch.dtype
    """Of products and of activations between stages."""
    first_moment: torch.dtype
    """Of AdamW's first moment."""
    is_split: bool = False
    """Whether what computes is the upper half of the masters, of which the lower one lies beside it."""

    @property
    def is_mixed(self) -> bool:
        """Whether parameters are cast for forward and backward."""
        return self.compute != self.parameters


PRECISIONS = {
    "fp32": Precision(torch.float32, torch.float32, torch.float32),
    "fp64": Precision(torch.float64, torch.float64, torch.float64),
    "master": Precision(torch.float32, torch.bfloat16, torch.float32),
    "split": Precision(torch.float32, torch.bfloat16, torch.float32, is_split=True),
    "bf16": Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
}


def precision_of(config: Config, device: torch.device) -> Precision:
    """Dtypes of the run: `auto` is fp32 on a CPU and bf16 with fp32 masters on a GPU."""
    name = config.precision.name
    if name == "auto":
        name = "fp32" if device.type == "cpu" else "master"
    if config.precision.first_moment == "bf16":
        return replace(PRECISIONS[name], first_moment=torch.bfloat16)
    return PRECISIONS[name]
