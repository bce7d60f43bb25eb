"""Torch's private names, here and in `timeouts.py` only; holds for 2.11 to 2.13.

Torch does not publish the tables of its schedules, its runtime for tables, which adds sends and receives to
computations and runs them, and the reduction of FSDP2 gradients outside autograd. Its pipelining is imported
where there are stages only: it costs 0.7 s, which other meshes need not pay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from src.trainer.parallel.data import set_flags
from src.trainer.parallel.pipeline.program import Program
from src.trainer.parallel.pipeline.schedule import Action, Table, Turn, round_size

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
    from torch.distributed.pipelining.stage import PipelineStage


class TorchPipeline:
    """The stages of a rank under a table; what they compute is a program's."""

    def __init__(
        self,
        module: nn.Module,
        numbers: Sequence[int],
        table: Table,
        micro_batches: int,
        group: dist.ProcessGroup,
        example: Tensor,
    ) -> None:
        """`numbers` are this rank's stages; `example` has shape, dtype and device of what they hand on."""
        count = len(table) * len(numbers)
        self._stages = {number: make_stage(module, number, count, group, example) for number in numbers}
        self._schedule = make_schedule(list(self._stages.values()), table, micro_batches)
        self._count = micro_batches

    def run(self, program: Program, after: Callable[[], None]) -> None:
        """Run the table once; `after` is called after every backward and every part of one."""
        step = _Step(self._stages, self._schedule, program, after)
        step.register()
        for stage in self._stages.values():
            stage.has_backward = True
            stage.clear_runtime_states()
        self._schedule._step_microbatches([()] * self._count, [{}] * self._count, return_outputs=False)
        assert not step.handed, f"nobody took what was handed over: {sorted(step.handed)}"


@dataclass
class _Step:
    """The duties of torch's own computations: wait for what is received, keep what is to be sent."""

    stages: Mapping[int, PipelineStage]
    schedule: _PipelineScheduleRuntime
    program: Program
    after: Callable[[], None]
    handed: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)
    """What a stage hands to its neighbour on this rank, to which torch sends nothing: activation (F) or
    gradient (B), stage that takes it and micro-batch → tensor."""

    def register(self) -> None:
        """Put this step's functions in the place of torch's; what may overlap runs in order.

        Parameters are gathered by FSDP's own hooks and reduced once, after all stages (ENG-16).
        """
        from torch.distributed.pipelining import schedules as s

        compute: dict[Any, Callable[[int, int], None]] = {
            s.FORWARD: self.forward,
            s.FULL_BACKWARD: partial(self.backward, defer=False),
            s.BACKWARD_INPUT: partial(self.backward, defer=True),
            s.BACKWARD_WEIGHT: self.weights,
        }

        def run(action: Any, ctx: object) -> None:
            for part in action.sub_actions or (action,):
                compute[part.computation_type](part.stage_index, part.microbatch_index)

        self.schedule._comp_type_to_function_map.clear()
        for kind in (*compute, s.OVERLAP_F_B):
            self.schedule.register_custom_function(kind, run)
        for kind in (s.UNSHARD, s.RESHARD, s.REDUCE_GRAD):
            self.schedule.register_custom_function(kind, lambda action, ctx: None)

    def forward(self, number: int, index: int) -> None:
        """Compute a micro-batch from what the previous stage sent, and keep the result for the next one."""
        stage, received = self.stages[number], None
        if number - 1 in self.stages:
            received = self.handed.pop(("F", number, index))
        elif not stage.is_first:
            received = _received(self.schedule.fwd_recv_ops.pop((number, index)), stage.args_recv_info[index])
        out = self.program.forward(number, index, received)
        if number + 1 in self.stages:
            self.handed["F", number + 1, index] = out
        else:
            stage.fwd_cache[index] = ((out,), [])

    def backward(self, number: int, index: int, defer: bool) -> None:
        """Back through a micro-batch, from the loss or from what the next stage sent."""
        stage, gradient = self.stages[number], None
        stage.fwd_cache.pop(index, None)
        if number + 1 in self.stages:
            gradient = self.handed.pop(("B", number, index))
        elif not stage.is_last:
            gradient = _received(self.schedule.bwd_recv_ops.pop((number, index)), stage.grad_recv_info[index])
        found = self.program.backward(number, index, gradient, defer)
        if found is not None and number - 1 in self.stages:
            self.handed["B", number - 1, index] = found
        elif found is not None:
            stage.bwd_cache[index] = (found.contiguous(),)
        self.schedule.backward_counter[number] += not defer
        self.after()

    def weights(self, number: int, index: int) -> None:
        """The weight gradients that a backward left over."""
        self.program.weights(number, index)
        self.schedule.backward_counter[number] += 1
        self.after()


def make_stage(
    module: nn.Module, number: int, stages: int, group: dist.ProcessGroup, example: Tensor
) -> PipelineStage:
    """A stage of this rank. Shapes are given, else torch runs the module to learn them (ENG-13)."""
    from torch.distributed.pipelining.stage import PipelineStage

    meta = torch.empty_like(example, device="meta")
    shapes: dict[str, Any] = {"input_args": (meta.requires_grad_(),), "output_args": (meta,)}
    stage: Any = PipelineStage(module, number, stages, example.device, group=group, **shapes)
    greet = stage._get_init_p2p_neighbors_ops  # In 2.11 this rank too, to which gloo has no connection.
    stage._get_init_p2p_neighbors_ops = lambda: [op for op in greet() if op.group_peer != group.rank()]
    made: PipelineStage = stage
    return made


def make_schedule(stages: list[PipelineStage], table: Table, micro_batches: int) -> _PipelineScheduleRuntime:
    """Torch's runtime for a table, sends and receives added; it learns from it which rank has which stage."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as Runtime

    schedule = Runtime(stages, micro_batches, loss_fn=_no_loss, scale_grads=False)  # type: ignore[no-untyped-call]
    schedule._prepare_schedule_with_comms(to_torch(table))
    return schedule


def to_torch(table: Table) -> dict[int, list[Any]]:
    """A table in torch's action type."""
    from torch.distributed.pipelining import schedules as s

    def convert(turn: Turn) -> Any:
        parts = tuple(s._Action(a.stage, s._ComputationType(a.kind), a.micro_batch) for a in turn)
        return parts[0] if len(parts) == 1 else s._Action(-1, s.OVERLAP_F_B, None, parts)

    return {rank: [convert(turn) for turn in turns] for rank, turns in table.items()}


def torch_table(schedule: str, ranks: int, per_rank: int, micro_batches: int) -> Table:
    """The table of a schedule that torch has, without its stages; idle slots are left out."""
    from torch.distributed.pipelining import schedules as s

    kind: Any = {
        "interleaved_1f1b": s.ScheduleInterleaved1F1B,
        "zbv": s.ScheduleZBVZeroBubble,
        "dualpipev": s.ScheduleDualPipeV,
    }[schedule]
    numbers = SimpleNamespace(
        pp_group_size=ranks,
        num_stages=ranks * per_rank,
        n_local_stages=per_rank,
        _n_microbatches=micro_batches,
        microbatches_per_round=round_size(ranks, micro_batches),
    )

    def convert(action: Any) -> Turn:
        parts = action.sub_actions or (action,)
        return tuple(Action(a.computation_type.value, a.stage_index, a.microbatch_index) for a in parts)

    orders = {rank: kind._calculate_single_rank_operations(numbers, rank) for rank in range(ranks)}
    return {rank: [convert(a) for a in order if a is not None] for rank, order in orders.items()}


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
            _keep_wide(group)
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


def _fill(group: Any) -> None:
    """Zeros where a parameter of a unit got no gradient on this rank."""
    for parameter in group.fsdp_params:
        if parameter.unsharded_accumulated_grad is None and parameter.unsharded_param.grad is None:
            parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)


def _keep_wide(group: Any) -> None:
    """Leave gradients in the dtype of their reduction; a gather outside a forward settles it anew."""
    if group._reduce_dtype not in (None, group._orig_dtype):  # As with `precision=split`.
        group._orig_dtype = group._reduce_dtype
        for parameter in group.fsdp_params:
            parameter.sharded_param.grad_dtype = None


def _received(works: Sequence[dist.Work], infos: Sequence[Any]) -> Tensor:
    """The one tensor of a message, once it is here."""
    for work in works:
        work.wait()
    (buffer,) = (info.buffer for info in infos)
    assert isinstance(buffer, Tensor)
    return buffer


def _no_loss(*_: Any) -> Tensor:
    raise AssertionError("the loss is computed by the stage")
