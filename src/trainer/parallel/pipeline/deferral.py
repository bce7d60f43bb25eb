"""Weight gradients that are computed after the backward which found them (ENG-15).

Projections and experts ask before each weight gradient (`kernels.later`). What is put off is kept in order of
arrival, so that it adds up as it would have at once, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from src.kernels.registry import Ops

Product = Callable[[], Tensor]
Waiting = list[tuple[Tensor, Product]]
"""Weights and what is still to be added to their gradients."""


class Deferral:
    """Takes weight gradients over while it is open, else leaves them to autograd."""

    def __init__(self) -> None:
        self._into: Waiting | None = None

    def __call__(self, weight: Tensor, product: Product) -> bool:
        """See `kernels.later.Later`."""
        if self._into is None:
            return False
        assert weight.is_leaf, "only the gradient of a parameter can wait"
        self._into.append((weight, product))
        return True

    @contextmanager
    def collect(self, into: Waiting) -> Iterator[None]:
        """Put the weight gradients of the backwards inside off, into a list."""
        self._into = into
        try:
            yield
        finally:
            self._into = None

    def ops(self, ops: Ops) -> Ops:
        """The operations whose weight gradients this may take over."""
        asked = ("linear", "linear_fp8", "grouped_mm", "grouped_mm_fp8")
        ours: dict[str, Any] = {name: partial(getattr(ops, name), later=self) for name in asked}
        return replace(ops, **ours)


@torch.no_grad()
def settle(waiting: Waiting) -> None:
    """Add what waits to the gradients, and empty the list."""
    for weight, product in waiting:
        if weight.grad is None:
            weight.grad = product()
        else:
            weight.grad.add_(product())
    waiting.clear()
