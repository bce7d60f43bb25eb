"""Torch's private names, in this file only; holds for 2.11 to 2.13.

Two things are taken from torch that it does not publish: `_PipelineScheduleRuntime`, which adds sends and
receives to a table of computations and runs it, and the reduction of FSDP2's gradients outside autograd.
Torch's pipelining is imported where there are stages only: it costs 0.7 s, which other meshes need not pay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from src.trainer.parallel.pipeline.program import Program
from src.trainer.parallel.pipeline.schedule import Table

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
    from torch.distributed.pipelining.stage import PipelineStage


class TorchPipeline:
    """One stage of a rank under a table; what it computes is a program's."""

    def __init__(
        self, module: nn.Module, table: Table, micro_batches: int, group: dist.ProcessGroup, example: Tensor
    ) -> None:
        """`example` has shape, dtype and device of the activation between stages."""
        self._stage = make_stage(module, len(table), group, example)
        self._schedule = make_schedule(self._stage, table, micro_batches)
        self._count = micro_batches

    def run(self, program: Program, after: Callable[[], None], reduce: Callable[[], None]) -> None:
        """Run a step.

        Args:
            program: computes forwards and backwards.
            after: called after every backward.
            reduce: called once, after the last backward.
        """
        step = _Step(self._stage, self._schedule, program, after)
        step.register(reduce)
        self._stage.has_backward = True
        self._stage.clear_runtime_states()
        self._schedule._step_microbatches([()] * self._count, [{}] * self._count, return_outputs=False)


class _Step:
    """The duties of torch's own computations: wait for what is received, keep what is to be sent."""

    def __init__(
        self,
        stage: PipelineStage,
        schedule: _PipelineScheduleRuntime,
        program: Program,
        after: Callable[[], None],
    ) -> None:
        self._stage, self._schedule = stage, schedule
        self._program, self._after = program, after

    def register(self, reduce: Callable[[], None]) -> None:
        """Put this step's functions in the place of torch's; parameters are gathered by FSDP's own hooks."""
        from torch.distributed.pipelining import schedules

        functions: dict[Any, Any] = {
            schedules.FORWARD: lambda action, context: self.forward(action.microbatch_index),
            schedules.FULL_BACKWARD: lambda action, context: self.backward(action.microbatch_index),
            schedules.UNSHARD: lambda action, context: None,
            schedules.RESHARD: lambda action, context: None,
            schedules.REDUCE_GRAD: lambda action, context: reduce(),
        }
        self._schedule._comp_type_to_function_map.clear()
        for kind, function in functions.items():
            self._schedule.register_custom_function(kind, function)

    def forward(self, index: int) -> None:
        """Compute a micro-batch from what the previous stage sent, and keep the result for the next one."""
        received = None
        if not self._stage.is_first:
            _wait(self._schedule.fwd_recv_ops.pop((self._stage.stage_index, index)))
            received = _buffer(self._stage.args_recv_info[index])
        out = self._program.forward(self._stage.stage_index, index, received)
        self._stage.fwd_cache[index] = ((out,), [])

    def backward(self, index: int) -> None:
        """Back through a micro-batch, from the loss or from what the next stage sent."""
        self._stage.fwd_cache.pop(index)
        gradient = None
        if not self._stage.is_last:
            _wait(self._schedule.bwd_recv_ops.pop((self._stage.stage_index, index)))
            gradient = _buffer(self._stage.grad_recv_info[index])
        found = self._program.backward(self._stage.stage_index, index, gradient, defer=False)
        self._schedule.backward_counter[self._stage.stage_index] += 1
        if found is not None:
            self._stage.bwd_cache[index] = (found.contiguous(),)
        self._after()


def make_stage(module: nn.Module, stages: int, group: dist.ProcessGroup, example: Tensor) -> PipelineStage:
    """This rank's stage. Shapes are given, else torch runs the module to learn them (ENG-13)."""
    from torch.distributed.pipelining.stage import PipelineStage

    rank = dist.get_rank(group)
    device = example.device
    meta = torch.empty_like(example, device="meta")
    return PipelineStage(
        module, rank, stages, device, input_args=(meta.requires_grad_(),), output_args=(meta,), group=group
    )


def make_schedule(stage: PipelineStage, table: Table, micro_batches: int) -> _PipelineScheduleRuntime:
    """Torch's runtime for a table of ours, sends and receives added."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    schedule = _PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
        [stage], micro_batches, loss_fn=_no_loss, scale_grads=False
    )
    schedule.pipeline_order = lowerable(table)
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    return schedule


def lowerable(table: Table) -> dict[int, list[Any]]:
    """A table in torch's action type."""
    from torch.distributed.pipelining import schedules

    kinds = {"F": schedules.FORWARD, "B": schedules.FULL_BACKWARD}
    return {
        rank: [schedules._Action(a.stage, kinds[a.kind], a.micro_batch) for a in actions]
        for rank, actions in table.items()
    }


def reduce_gradients(root: nn.Module) -> None:
    """Reduce the gradients of an FSDP2 model: per unit a reduce-scatter, and an all-reduce if replicated.

    As `PipelineStage.perform_reduce_grad`, without importing torch's pipelining. All ranks issue
    the same reductions in the same order; a parameter that got no gradient contributes zeros.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    assert isinstance(root, FSDPModule)
    set_flags(root, last=True)
    state = fully_shard.state(root)  # type: ignore[attr-defined]
    for unit in state._state_ctx.all_states:
        group = unit._fsdp_param_group
        if group is not None:
            _fill(group)
            group.post_backward()
    state._root_post_backward_final_callback()
    set_flags(root, last=False)


def fold_gradients(root: nn.Module) -> None:
    """Add the gradients of a backward to those before it, in the dtype of the reduction (ENG-15)."""
    from torch.distributed.fsdp import fully_shard

    fully_shard.state(root)._root_post_backward_final_callback()  # type: ignore[attr-defined]


def settle(root: nn.Module) -> None:
    """Finish FSDP2's set-up now, not in the first forward, where it may move a shard to a padded copy."""
    from torch.distributed.fsdp import fully_shard

    fully_shard.state(root)._lazy_init()  # type: ignore[attr-defined]


def set_flags(root: nn.Module, last: bool) -> None:
    """Whether the next backward reduces and reshards; it must not but in `reduce_gradients` (ENG-16)."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(root, FSDPModule)
    root.set_is_last_backward(last)
    root.set_reshard_after_backward(last)
    root.set_requires_gradient_sync(last)


def _fill(group: Any) -> None:
    """Zeros where a parameter of a unit got no gradient on this rank."""
    for parameter in group.fsdp_params:
        if parameter.unsharded_accumulated_grad is None and parameter.unsharded_param.grad is None:
            parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)


def _buffer(infos: Sequence[Any]) -> Tensor:
    (info,) = infos
    buffer: Tensor = info.buffer
    return buffer


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _no_loss(*_: Any) -> Tensor:
    raise AssertionError("the loss is computed by the stage")
