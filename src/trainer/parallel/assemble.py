"""Puts a rank's part of the model together: which layers and experts, in which dtypes, sharded how."""

from __future__ import annotations

from typing import Any, cast

import torch

from src.config import Config
from src.kernels.registry import Ops
from src.models.build import CausalLM, Holding, Stage, build, param_specs
from src.models.dispatch import LocalDispatcher
from src.models.protocol import Dispatcher
from src.trainer.parallel import layout
from src.trainer.parallel.data import is_sharded, shard
from src.trainer.parallel.expert import ExpertDispatcher
from src.trainer.parallel.masters import cast_for_compute
from src.trainer.parallel.pipeline.adapter import settle
from src.trainer.parallel.precision import Precision
from src.trainer.runtime import Runtime


def materialise(config: Config, runtime: Runtime, ops: Ops, precision: Precision) -> CausalLM[Any]:
    """This rank's part of the model in memory, sharded; weights are still garbage, buffers are not.

    What is sharded starts on the meta device, so that no rank holds more than its shards. A model that
    is not goes straight to memory: torch's `empty_like` of a meta tensor imports sympy, 0.45 s on this path.
    """
    sharded = is_sharded(runtime)
    with torch.device("meta") if sharded else runtime.device:
        model = build(config.model, holding_of(config, runtime), ops)
    if sharded:
        model.to(precision.parameters)
    if precision.is_split or not sharded:
        cast_for_compute(model, param_specs(model), precision)
    if sharded:
        shard(model, param_specs(model), runtime, precision)
        model.to_empty(device=runtime.device)
    model.reset_buffers(runtime.device)
    if sharded:
        settle(model)
    return model


def holding_of(config: Config, runtime: Runtime) -> Holding:
    """Layers and experts that this rank holds."""
    count, place = layout.stage_count(config), runtime.place
    layers = layout.split_layers(config.model.num_layers, count)
    mine = layout.stages_of(config, place.pp)
    stages = tuple(Stage(layers[s], first=s == 0, last=s == count - 1) for s in mine)
    return Holding(stages, layout.expert_block(config.model.num_experts, config.mesh.ep, place.ep))


def make_dispatcher(experts: int, runtime: Runtime, ops: Ops) -> Dispatcher:
    """Stages 2 and 4: over the ep ranks, or on this rank alone."""
    group = runtime.group("ep")
    if group is not None:
        return ExpertDispatcher(group, experts, ops)
    return cast(Dispatcher, LocalDispatcher(experts, ops))
