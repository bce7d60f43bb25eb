"""Runs the micro-batches of a step: one after the other, or with stages by a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from src.config import Config
from src.trainer.parallel.pipeline.adapter import TorchPipeline
from src.trainer.parallel.pipeline.program import Program
from src.trainer.parallel.pipeline.schedule import TABLES
from src.trainer.runtime import Runtime

Forward = Callable[[Tensor | None], Tensor]
"""What a stage received or None → what it sends on, or a result on the last stage."""


class Executor(Protocol):
    """How the stages of a rank go through the micro-batches of a step."""

    def run(self, program: Program, after: Callable[[], None], reduce: Callable[[], None]) -> None:
        """Each micro-batch forward and backward; `after` each backward, `reduce` after the last."""
        ...

    def infer(self, forward: Forward, example: Tensor) -> Tensor | None:
        """One forward through all stages, without gradients; its result on the last stage, else None."""
        ...


class Sequential:
    """The whole model on this rank: forward and backward of one micro-batch after the other."""

    def __init__(self, micro_batches: int) -> None:
        self._count = micro_batches

    def run(self, program: Program, after: Callable[[], None], reduce: Callable[[], None]) -> None:
        """See `Executor`."""
        for index in range(self._count):
            program.forward(0, index, None)
            program.backward(0, index, None, defer=False)
            after()
        reduce()

    def infer(self, forward: Forward, example: Tensor) -> Tensor | None:
        """See `Executor`."""
        return forward(None)


class Pipelined:
    """One stage on this rank."""

    def __init__(
        self, model: nn.Module, config: Config, micro_batches: int, runtime: Runtime, dtype: torch.dtype
    ) -> None:
        group = runtime.group("pp")
        assert group is not None
        shape = (config.micro_batch_size, config.sequence_length // config.mesh.cp, config.model.hidden_size)
        example = torch.empty(shape, dtype=dtype, device=runtime.device)
        table = TABLES[config.pipeline.schedule](config.mesh.pp, micro_batches)
        self._pipeline = TorchPipeline(model, table, micro_batches, group, example)
        self._group, self._stage, self._stages = group, runtime.place.pp, config.mesh.pp

    def run(self, program: Program, after: Callable[[], None], reduce: Callable[[], None]) -> None:
        """See `Executor`."""
        self._pipeline.run(program, after, reduce)

    def infer(self, forward: Forward, example: Tensor) -> Tensor | None:
        """See `Executor`; `example` has shape, dtype and device of what travels."""
        received = None
        if self._stage > 0:
            received = torch.empty_like(example)
            dist.recv(received, group=self._group, group_src=self._stage - 1)
        out = forward(received)
        if self._stage == self._stages - 1:
            return out
        dist.send(out.contiguous(), group=self._group, group_dst=self._stage + 1)
        return None


def make_executor(
    model: nn.Module, config: Config, micro_batches: int, runtime: Runtime, dtype: torch.dtype
) -> Executor:
    """The executor that the mesh needs; `dtype` is that of activations."""
    if config.mesh.pp == 1:
        return Sequential(micro_batches)
    return Pipelined(model, config, micro_batches, runtime, dtype)
