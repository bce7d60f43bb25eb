"""Runs the micro-batches of a step: one after the other, or with stages by a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from src.config import Config
from src.trainer.parallel import layout
from src.trainer.parallel.pipeline.adapter import TorchPipeline
from src.trainer.parallel.pipeline.program import Program
from src.trainer.parallel.pipeline.tables import make_table
from src.trainer.runtime import Runtime

Forward = Callable[[int, Tensor | None], Tensor]
"""A stage's number, what it received or None → what it sends on, or a result on the last stage."""


class Executor(Protocol):
    """How the stages of a rank go through the micro-batches of a step."""

    def run(self, program: Program, after: Callable[[], None], reduce: Callable[[], None]) -> None:
        """Each micro-batch forward and backward; `after` each backward, `reduce` after the last."""
        ...

    def infer(self, forward: Forward, example: Tensor) -> Tensor | None:
        """One forward through all stages, without gradients; its result where the last one is, else None."""
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
        return forward(0, None)


class Pipelined:
    """One stage or several on this rank."""

    def __init__(
        self, model: nn.Module, config: Config, micro_batches: int, runtime: Runtime, dtype: torch.dtype
    ) -> None:
        group = runtime.group("pp")
        assert group is not None
        shape = (config.micro_batch_size, config.sequence_length // config.mesh.cp, config.model.hidden_size)
        example = torch.empty(shape, dtype=dtype, device=runtime.device)
        table = make_table(
            config.pipeline.schedule, config.mesh.pp, layout.stages_per_rank(config), micro_batches
        )
        self._ranks = [layout.rank_of(config, stage) for stage in range(layout.stage_count(config))]
        self._group, self._rank = group, runtime.place.pp
        self._pipeline = TorchPipeline(
            model, layout.stages_of(config, self._rank), table, micro_batches, group, example
        )

    def run(self, program: Program, after: Callable[[], None], reduce: Callable[[], None]) -> None:
        """See `Executor`."""
        self._pipeline.run(program, after)
        reduce()

    def infer(self, forward: Forward, example: Tensor) -> Tensor | None:
        """See `Executor`; `example` has shape, dtype and device of what travels."""
        held: Tensor | None = None
        for stage, rank in enumerate(self._ranks):
            if rank != self._rank:
                continue
            if stage and self._ranks[stage - 1] != rank:
                held = torch.empty_like(example)
                dist.recv(held, group=self._group, group_src=self._ranks[stage - 1])
            held = forward(stage, held)
            if stage + 1 < len(self._ranks) and self._ranks[stage + 1] != rank:
                dist.send(held.contiguous(), group=self._group, group_dst=self._ranks[stage + 1])
                held = None
        return held


def make_executor(
    model: nn.Module, config: Config, micro_batches: int, runtime: Runtime, dtype: torch.dtype
) -> Executor:
    """The executor that the mesh needs; `dtype` is that of activations."""
    if config.mesh.pp == 1:
        return Sequential(micro_batches)
    return Pipelined(model, config, micro_batches, runtime, dtype)
