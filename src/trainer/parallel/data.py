"""Data parallelism: FSDP2 over (dp, cp, ep), experts over (dp, cp), replicated over rep (ENG-2, ENG-3).

Every unit sums: the loss is divided by the global token count before the backward, so no reduction may divide
again. Gradients are reduced once a step, outside autograd (`adapter.reduce_gradients`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from src.models.build import CausalLM, ParamSpec
from src.trainer.parallel import layout
from src.trainer.parallel.precision import Precision
from src.trainer.runtime import Runtime

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard


def is_sharded(runtime: Runtime) -> bool:
    """Whether parameters are shared out or replicated; otherwise a stage keeps plain modules."""
    return layout.is_sharded(runtime.mesh)


def shard(
    model: CausalLM[Any], specs: Mapping[str, ParamSpec], runtime: Runtime, precision: Precision
) -> None:
    """Make FSDP2 units of the parts of a model on the meta device: experts, layers, embedding, the rest.

    Under mixed precision what is `wide` (the router) is a unit of its own, whose parameters are not cast.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    # No operation in place follows a stage's output, so that its being a view is no danger.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    dense, experts = make_mesh(runtime, "dp", "cp", "ep"), make_mesh(runtime, "dp", "cp")
    for name, layer in model.model.layers.named_children():
        for path, part in layer.named_modules(prefix=f"model.layers.{name}"):
            own = [specs[f"{path}.{n}"] for n, _ in part.named_parameters(recurse=False)]
            if any(spec.expert for spec in own):
                make_unit(part, experts, precision, stacks=True)
            elif precision.is_mixed and any(spec.wide for spec in own):
                make_unit(part, dense, replace(precision, compute=precision.parameters))
        make_unit(layer, dense, precision)
    if model.holding.first and not model.config.tie_embeddings:
        make_unit(model.model.embed_tokens, dense, precision)
    make_unit(model, dense, precision)
    for method in ("loss", "logits"):
        register_fsdp_forward_method(model, method)
    set_flags(model, last=False)


def set_flags(root: nn.Module, last: bool) -> None:
    """Whether the next backward reduces and reshards; it must not but in `reduce_gradients` (ENG-16)."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(root, FSDPModule)
    root.set_is_last_backward(last)
    root.set_reshard_after_backward(last)
    root.set_requires_gradient_sync(last)


def make_unit(module: nn.Module, mesh: DeviceMesh, precision: Precision, stacks: bool = False) -> None:
    """One FSDP2 unit: what it holds is gathered, cast and reduced together; `stacks` hold our experts.

    What goes in is not cast: activations come in the right dtype, and 1/N_tok or a routing weight in bf16
    would be off by up to 1/256.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if precision.is_mixed:
        policy = MixedPrecisionPolicy(
            param_dtype=precision.compute, reduce_dtype=precision.parameters, cast_forward_inputs=False
        )
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=False,
        shard_placement_fn=placement(mesh.size(mesh.ndim - 1), stacks),
        mp_policy=policy,
    )
    sum_only(module)


def sum_only(module: nn.Module) -> None:
    """Reduce a unit's gradients by SUM; neither call reaches the units inside (ENG-3)."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def placement(size: int, stacks: bool) -> Callable[[nn.Parameter], Shard | None]:
    """Which dimension to cut: the first if it divides, else a stack's second if that does, else the first."""
    from torch.distributed.tensor import Shard

    def place(parameter: nn.Parameter) -> Shard | None:
        stack = stacks and parameter.dim() == 3
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


def unshard(model: nn.Module) -> None:
    """Gather the parameters of all units; what is gathered already stays as it is."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def reshard(model: nn.Module) -> None:
    """Drop gathered parameters, after a forward that no backward follows."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
