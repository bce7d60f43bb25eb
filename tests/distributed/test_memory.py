"""The plan's bytes of a rank against what ranks hold, on meshes and layouts of precision (PROJ-1, PROJ-2)."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from src.config import Config, OptimizerConfig, PrecisionConfig
from src.launchers.memory import rank_memory
from src.trainer.runtime import join
from tests.checkpoint.groups import mesh_of
from tests.distributed.world import run
from tests.models.odd import deepseek_v2
from tests.trainer.memory_use import use_of
from tests.trainer.small import small_config

CASES = (
    ("ep2", "fp32", "auto", "adamw"),
    ("rep2", "split", "auto", "sgd"),
    ("pp2", "master", "bf16", "adamw"),
)
"""Mesh, precision, its first moment, optimizer."""


def config_of(root: Path, mesh: str, precision: str, moment: str, kind: str) -> Config:
    """An odd model with stacks that two ranks cut inside, and two micro-batches a data rank."""
    optimizer = OptimizerConfig(kind=kind, lr=1e-3, momentum=0.9)
    return small_config(
        root, model=deepseek_v2(num_experts=6, num_groups=3, num_layers=4), mesh=mesh_of(mesh),
        micro_batch_size=2,
        precision=PrecisionConfig(precision, moment), optimizer=optimizer, global_batch_size=8,
        sequence_length=80,
    )  # fmt: skip


def measure(root: Path, cases: list[tuple[str, ...]]) -> list[dict[str, int]]:
    """In one rank: what it holds in each case."""
    rank = torch.distributed.get_rank()
    found = []
    for case in cases:
        config = config_of(root, *case)
        runtime = join(config.mesh, rank, rank, torch.device("cpu"))
        found.append(asdict(use_of(config, runtime)))
    return found


@pytest.mark.slow
def test_proj_1_states_are_those_of_the_ranks(tmp_path: Path) -> None:
    """Weights, gradients and moments to the byte; the fullest moment of a step within a sixth."""
    found = run(2, measure, tmp_path, CASES)
    for number, case in enumerate(CASES):
        for rank in range(2):
            use, plan = found[rank][number], rank_memory(config_of(tmp_path, *case), rank, "cpu")
            states = (plan.weights, plan.gradients, plan.optimizer)
            assert states == (use["weights"], use["gradients"], use["optimizer"]), (case, rank)
            beside = plan.total - plan.weights - plan.optimizer
            assert abs(beside / use["beside"] - 1) < 1 / 6, (case, rank, beside, use["beside"])
