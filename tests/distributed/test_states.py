"""Bytes of states by the plan against the modules of each rank on the meta device, on every mesh (PROJ-1)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from src.config import Config, DeterminismConfig, KernelsConfig, OptimizerConfig, PrecisionConfig
from src.kernels.registry import describe
from src.launchers.memory import rank_memory
from src.models.build import build, param_specs
from src.trainer.parallel.assemble import holding_of
from src.trainer.parallel.data import placement
from src.trainer.parallel.layout import coordinates
from src.trainer.products import chosen
from src.trainer.runtime import Runtime
from tests.checkpoint.groups import mesh_of
from tests.distributed.configs import MODELS
from tests.trainer.small import small_config

MESHES = ("single", "pp2", "ep2", "dp3", "rep2dp2", "cp2", "pp2ep2", "dp2ep2", "pp4dp5ep2", "pp2cp2", "dp11")
LAYOUTS = {
    ("fp32", "auto", "adamw"): (4, 4, 8),
    ("fp64", "auto", "adamw"): (8, 8, 16),
    ("bf16", "auto", "adamw"): (2, 2, 4),
    ("master", "auto", "adamw"): (6, 4, 8),
    ("master", "bf16", "adamw"): (6, 4, 6),
    ("split", "bf16", "adamw"): (4, 4, 6),
    ("split", "auto", "sgd"): (4, 4, 4),
}
"""Precision, first moment, optimizer → bytes of a parameter that is no router's: weights, gradients, moments.

Of `master`, 2 are copies, which ranks that share nothing have and which routers have nowhere.
"""


def held(config: Config, rank: int) -> tuple[int, int]:
    """Elements of a rank's shards, cut by torch itself: of routers, and of everything else."""
    place, mesh = coordinates(config.mesh, rank), config.mesh
    runtime = Runtime(rank, mesh.world, 0, torch.device("cpu"), mesh, place)
    with torch.device("meta"):
        ops = chosen(config, describe(torch.device("cpu")))
        model = build(config.model, holding_of(config, runtime), ops)
    specs, found = param_specs(model), [0, 0]
    for name, parameter in model.named_parameters():
        shards, index = mesh.dp * mesh.cp, place.dp * mesh.cp + place.cp
        if not specs[name].expert:
            shards, index = shards * mesh.ep, index * mesh.ep + place.ep
        cut = placement(shards, specs[name].expert)(parameter)
        chunks = parameter.chunk(shards, 0 if cut is None else cut.dim)
        found[not specs[name].wide] += chunks[index].numel() if index < len(chunks) else 0
    return found[0], found[1]


CASES = [(model, spec) for model in MODELS for spec in MESHES if model != "dense" or "ep" not in spec]


@pytest.mark.parametrize(("model", "spec"), CASES)
def test_proj_1_states_on_every_mesh(tmp_path: Path, model: str, spec: str) -> None:
    """PROJ-1: weights, gradients and moments of every rank, to the byte, in every layout of precision."""
    base = small_config(
        tmp_path, model=MODELS[model], mesh=mesh_of(spec), global_batch_size=660,
        kernels=KernelsConfig("eager"), determinism=DeterminismConfig(),
    )  # fmt: skip
    elements = {rank: held(base, rank) for rank in range(base.mesh.world)}
    for (precision, moment, kind), (weight, gradient, optimizer) in LAYOUTS.items():
        config = replace(
            base, precision=PrecisionConfig(precision, moment), optimizer=OptimizerConfig(kind, momentum=0.9)
        )
        copies = 2 if precision == "master" else 0
        shared = copies if base.mesh.rep * base.mesh.dp * base.mesh.cp * base.mesh.ep > 1 else 0
        for rank, (routers, others) in elements.items():
            plan, every = rank_memory(config, rank, "cpu"), routers + others
            assert plan.parameters == every
            assert plan.weights == others * (weight - shared) + routers * (weight - copies)
            assert (plan.gradients, plan.optimizer) == (every * gradient, every * optimizer)
