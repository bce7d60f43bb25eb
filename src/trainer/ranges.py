"""Named ranges in a trace, `layer.stage.direction`, for torch's profiler and for NVTX (PROF-1, PROF-2).

Nobody makes a `Ranges` but a window that is traced; all others pass None on. Ranges begin and end between
layers and stages, never inside what is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


class Ranges:
    """Writes ranges; those of NVTX on a GPU only, whose profilers read them."""

    def __init__(self, device: torch.device) -> None:
        self._has_nvtx = device.type == "cuda"
        self._backward: AbstractContextManager[None] | None = None

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """The kernels that the body starts."""
        with torch.profiler.record_function(name):
            if self._has_nvtx:
                torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
            try:
                yield
            finally:
                if self._has_nvtx:
                    torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def around(self, first: int) -> Callable[[int, Callable[..., Tensor]], Callable[..., Tensor]]:
        """(index, layer) → the layer with a range around it, forward and backward; `first` begins the run.

        On the way back the gradient of its output opens a layer's range, and that of its input ends it: of
        the layer before it that is the output. All of them come in the thread of the backward pass.
        """

        def wrap(index: int, layer: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def call(hidden_TD: Tensor, *rest: Any) -> Tensor:
                with self.named(f"{index}.layer.forward"):
                    out_TD = layer(hidden_TD, *rest)
                if index == first:
                    self._at(hidden_TD, None)
                self._at(out_TD, f"{index}.layer.backward")
                return out_TD

            return call

        return wrap

    def _at(self, x: Tensor, name: str | None) -> None:
        if x.requires_grad:
            x.register_hook(lambda _: self._turn(name))  # type: ignore[no-untyped-call]

    def _turn(self, name: str | None) -> None:
        """End the open range of the backward pass, and begin the next."""
        if self._backward is not None:
            self._backward.__exit__(None, None, None)
        self._backward = None if name is None else self.named(name)
        if self._backward is not None:
            self._backward.__enter__()


def within(ranges: Ranges | None, name: str) -> AbstractContextManager[None]:
    """A range of that name if anything is traced."""
    return nullcontext() if ranges is None else ranges.named(name)
