"""Views of masters that are kept in two halves (`precision=split`), beside views that are plain tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from src.kernels import halves


@dataclass(frozen=True)
class Halves:
    """A view of fp32 numbers in two tensors: it is written to like a tensor, and read by `whole`."""

    high: Tensor
    """bf16, a view of what computes."""
    low: Tensor
    """int16, of the same shape."""

    @property
    def shape(self) -> torch.Size:
        """Of the numbers."""
        return self.high.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers."""
        return torch.float32

    def numel(self) -> int:
        """How many numbers there are."""
        return self.high.numel()

    def __getitem__(self, at: Any) -> Halves:
        return Halves(self.high[at], self.low[at])

    def copy_(self, values: Tensor) -> None:
        """Take over `values` of this shape, cast to fp32."""
        halves.keep(values.to(device=self.high.device, dtype=torch.float32), self.high, self.low)

    def fill_(self, value: float) -> None:
        """Write one number everywhere."""
        self.copy_(torch.full(self.shape, value))


View = Tensor | Halves
"""A part of a parameter or of a moment in this rank's memory."""


def whole(view: View) -> Tensor:
    """The numbers of a view as one tensor: the view itself, or fp32 numbers put together."""
    return halves.join(view.high, view.low) if isinstance(view, Halves) else view
