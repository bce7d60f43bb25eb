"""The seam through which an operation lets somebody else compute the gradient of its weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Later(Protocol):
    """Asked in a backward for each weight gradient."""

    def __call__(self, weight: Tensor, product: Callable[[], Tensor]) -> bool:
        """Whether it takes `product` over, to add it to the gradient of `weight` itself."""
        ...
