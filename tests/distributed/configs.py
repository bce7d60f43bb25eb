"""Configs of the law 1 suite: the odd DeepSeek-V2 with four layers and twenty experts, on any mesh."""

from __future__ import annotations

from dataclasses import dataclass

from src.config import BalanceConfig, Config, KernelsConfig, MeshConfig, PipelineConfig, PrecisionConfig
from tests.distributed.batches import BLOCK, LENGTH, SAMPLES
from tests.models import odd


@dataclass(frozen=True)
class Case:
    """One line of the matrix."""

    mesh: MeshConfig
    schedule: str
    batch: str
    precision: str

    @property
    def balance(self) -> str:
        """Every kind of auxiliary loss meets every mesh."""
        return {"dense": "sequence", "packed": {"fp64": "global_batch_lagged", "fp32": "micro_batch"}[self.precision]}[
            self.batch
        ]

    def __str__(self) -> str:
        return f"{self.mesh.spec}-{self.schedule}-{self.batch}-{self.precision}"


MESHES = {
    1: (MeshConfig("single"),),
    2: (MeshConfig("dp2", dp=2), MeshConfig("rep2", rep=2), MeshConfig("ep2", ep=2), MeshConfig("pp2", pp=2)),
    4: (
        MeshConfig("pp2ep2", pp=2, ep=2),
        MeshConfig("dp2ep2", dp=2, ep=2),
        MeshConfig("pp2dp2", pp=2, dp=2),
        MeshConfig("ep4", ep=4),
    ),
}
"""Ranks → the meshes of that size."""
SCHEDULES = ("gpipe", "1f1b")
BATCHES = ("dense", "packed")
PRECISIONS = ("fp64", "fp32")


def matrix(ranks: int) -> list[Case]:
    """Every case on that many ranks; the schedule says nothing where there are no stages."""
    return [
        Case(mesh, schedule, batch, precision)
        for mesh in MESHES[ranks]
        for schedule in (SCHEDULES if mesh.pp > 1 else SCHEDULES[-1:])
        for batch in BATCHES
        for precision in PRECISIONS
    ]


def make_config(case: Case) -> Config:
    """The run of a case."""
    return Config(
        model=odd.deepseek_v2(num_layers=4, num_experts=20),
        mesh=case.mesh,
        pipeline=PipelineConfig(schedule=case.schedule),
        kernels=KernelsConfig(name="eager"),
        balance=BalanceConfig(kind=case.balance, coef=0.03, z_loss=0.02),
        precision=PrecisionConfig(name=case.precision),
        seed=0,
        sequence_length=LENGTH,
        global_batch_size=SAMPLES,
        micro_batch_size=BLOCK,
    )
