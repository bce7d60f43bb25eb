"""Data parallelism: FSDP2 over (dp, cp, ep), experts over (dp, cp), replicated over rep (ENG-2, ENG-3).

Every unit sums: the loss is divided by the global token count before the backward, so no reduction may divide
again. Gradients are reduced once a step, outside autograd (`adapter.reduce_gradients`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from src.models.build import CausalLM
from src.models.layers import Experts
from src.trainer.parallel.pipeline.adapter import set_flags
from src.trainer.runtime import Runtime

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard


def is_sharded(runtime: Runtime) -> bool:
    """Whether any parameter is shared out or replicated; a stage alone, or one rank, keeps plain modules."""
    return runtime.size("rep", "dp", "cp", "ep") > 1


def shard(model: CausalLM[Any], runtime: Runtime, compute: torch.dtype | None = None) -> None:
    """Make FSDP2 units of the parts of a model on the meta device: experts, layers, embedding, the rest.

    Args:
        model: this rank's stage.
        runtime: the rank's groups.
        compute: dtype of parameters in forward and backward, if it differs from that of the masters.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    # No operation in place follows a stage's output, so that its being a view is no danger.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32 if compute else None)
    dense, experts = make_mesh(runtime, "dp", "cp", "ep"), make_mesh(runtime, "dp", "cp")

    def unit(module: nn.Module, mesh: DeviceMesh, size: int) -> None:
        place = placement(size)
        fully_shard(
            module, mesh=mesh, reshard_after_forward=False, shard_placement_fn=place, mp_policy=policy
        )
        sum_only(module)

    for layer in model.model.layers.values():
        for stack in (module for module in layer.modules() if isinstance(module, Experts)):
            unit(stack, experts, runtime.size("dp", "cp"))
        unit(layer, dense, runtime.size("dp", "cp", "ep"))
    if model.stage.first and not model.config.tie_embeddings:
        unit(model.model.embed_tokens, dense, runtime.size("dp", "cp", "ep"))
    unit(model, dense, runtime.size("dp", "cp", "ep"))
    for method in ("loss", "logits"):
        register_fsdp_forward_method(model, method)
    set_flags(model, last=False)


def sum_only(module: nn.Module) -> None:
    """Reduce a unit's gradients by SUM; neither call reaches the units inside (ENG-3)."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def placement(size: int) -> Callable[[nn.Parameter], Shard | None]:
    """Which dimension to cut: the first if it divides, else a stack's second if that does, else the first."""
    from torch.distributed.tensor import Shard

    def place(parameter: nn.Parameter) -> Shard | None:
        stack = parameter.dim() == 3
        if stack and parameter.shape[0] % size and parameter.shape[1] % size == 0:
            return Shard(1)
        return Shard(0)

    return place


def make_mesh(runtime: Runtime, *shard_axes: str) -> DeviceMesh:
    """The mesh that a parameter class lives on: (replicate, shard) if rep > 1, else (shard)."""
    from torch.distributed.device_mesh import DeviceMesh

    kind = runtime.device.type
    inner = runtime.group(*shard_axes) or alone(runtime)
    replicate = runtime.group("rep")
    if replicate is None:
        return DeviceMesh.from_group(inner, kind, mesh_dim_names=("shard",))
    ranks = torch.tensor(runtime.ranks("rep", *shard_axes), dtype=torch.int).view(runtime.size("rep"), -1)
    return DeviceMesh.from_group([replicate, inner], kind, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def alone(runtime: Runtime) -> dist.ProcessGroup:
    """A group of this rank only: FSDP2 wants one also where nothing is shared out."""
    group = dist.new_group([runtime.rank], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def reshard(model: nn.Module) -> None:
    """Drop gathered parameters, after a forward that no backward follows."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
