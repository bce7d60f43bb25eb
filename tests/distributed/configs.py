"""Configs of the law 1 suite: odd members with four layers and experts that ep divides, on any mesh."""

from __future__ import annotations

from dataclasses import dataclass

from src.config import (
    BackendConfig,
    BalanceConfig,
    Config,
    KernelsConfig,
    MeshConfig,
    PipelineConfig,
    PrecisionConfig,
    RecomputeConfig,
)
from src.mesh_spec import parse
from src.models.schema import ModelConfig
from src.trainer.parallel.rules import STAGES_PER_RANK
from tests.distributed.batches import BLOCK, SAMPLES, length_of
from tests.models import odd

Key = tuple[str, str, str, int]
"""Model with who routes, batch, precision and micro-batch size: what the oracle of a case depends on."""
MODELS: dict[str, ModelConfig] = {
    "deepseek_v2": odd.deepseek_v2(num_layers=4, num_experts=20),
    "qwen3_moe": odd.qwen3_moe(num_layers=4, num_experts=14),
    "gpt_oss": odd.gpt_oss(num_layers=4, num_experts=10),
    "dense": odd.dense(num_layers=4),
}


@dataclass(frozen=True)
class Case:
    """One line of the matrix."""

    mesh: MeshConfig
    schedule: str
    batch: str
    precision: str
    reduce: str = "step"
    block: int = BLOCK
    """Micro-batch size; another than `BLOCK` only where the auxiliary loss does not depend on it."""
    family: str = "deepseek_v2"
    """The model family."""
    recompute: str = "none"
    """What is computed again."""
    model: ModelConfig | None = None
    """Another model than the family's."""
    force: str = "none"
    """Who chooses the experts, if not the routers."""
    device: str = "cpu"
    """Where the ranks compute; of several ranks on `cuda` all share one card. The oracle is on a CPU."""

    @property
    def balance(self) -> str:
        """Every kind of auxiliary loss meets every mesh."""
        if self.batch.startswith("dense"):
            return "sequence"
        return "global_batch_lagged" if self.precision == "fp64" else "micro_batch"

    def __str__(self) -> str:
        options = (self.schedule, self.batch, self.precision, self.reduce, f"b{self.block}", self.recompute)
        options += tuple(word for word in (self.force, self.device) if word not in ("none", "cpu"))
        return "-".join((self.family, self.mesh.spec, *options))

    @property
    def key(self) -> Key:
        """What the oracle depends on: meshes and schedules share one."""
        unit = BLOCK if self.balance == "sequence" else self.block
        name = self.model.name if self.model else self.family
        return f"{name} {self.force}", self.batch, self.precision, unit


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
STAGED = ("interleaved_1f1b", "zbv", "dualpipev")
"""With two stages a rank."""
BATCHES = ("dense", "packed")
PRECISIONS = ("fp64", "fp32")


SINGLE = MESHES[1][0]
DP2, REP2, EP2, PP2 = MESHES[2]
EXTRA = {
    2: [
        *(
            Case(mesh, "1f1b", "packed", precision, "micro_batch")
            for mesh in (DP2, REP2)
            for precision in PRECISIONS
        ),
        *(
            Case(PP2, schedule, "dense", "fp64", block=block)
            for schedule in SCHEDULES
            for block in (24, 12, 8)
        ),
        *(Case(PP2, schedule, "packed", "fp64") for schedule in STAGED),
    ],
    4: [
        Case(MeshConfig("pp2ep2", pp=2, ep=2), "dualpipev", "packed", "fp64"),
        Case(MeshConfig("pp2dp2", pp=2, dp=2), "zbv", "packed", "fp64"),
        *(
            Case(mesh, schedule, batch, "fp32")
            for mesh, batch in zip((MESHES[4][0], MESHES[4][2]), BATCHES, strict=True)
            for schedule in STAGED
        ),
        *(Case(MeshConfig("pp4", pp=4), schedule, "packed", "fp64") for schedule in SCHEDULES),
        Case(MeshConfig("rep2ep2", rep=2, ep=2), "1f1b", "packed", "fp64"),
        Case(MeshConfig("rep2ep2", rep=2, ep=2), "1f1b", "dense", "fp32"),
        Case(MeshConfig("rep2dp2", rep=2, dp=2), "1f1b", "packed", "fp32"),
    ],
}
"""Cases beside the matrix: reduction after each micro-batch (ENG-16), 1 to 3 micro-batches, four stages on
two and on four ranks, and replicas of shards, where FSDP2's own factors would make dense gradients 1/4 and
experts' 1/2 (ENG-3)."""


OTHERS = ("qwen3_moe", "gpt_oss")
FAMILIES = {
    1: [Case(MESHES[1][0], "1f1b", "packed", "fp64", family=family) for family in (*OTHERS, "dense")],
    2: [
        *(Case(mesh, "1f1b", "packed", "fp64", family=family) for family in OTHERS for mesh in (DP2, EP2)),
        *(Case(mesh, "1f1b", "packed", "fp64", family="dense") for mesh in (DP2, REP2, PP2)),
    ],
    4: [
        *(Case(MESHES[4][0], "1f1b", batch, "fp64", family=family) for family in OTHERS for batch in BATCHES),
        Case(MeshConfig("dp4", dp=4), "1f1b", "packed", "fp64", family="gpt_oss"),
    ],
}
"""The other families on a few: what they add is in their layers, which know nothing of ranks.

On dp4 stacks of 10 experts are cut inside, and their biases between experts (ENG-2).
"""


CP2 = MeshConfig("cp2", cp=2)
CUT_BY_TWO = (
    MeshConfig("pp2cp2", pp=2, cp=2),
    MeshConfig("cp2ep2", cp=2, ep=2),
    MeshConfig("dp2cp2", dp=2, cp=2),
    MeshConfig("rep2cp2", rep=2, cp=2),
)
CUT = (("deepseek_v2", "packed12"), ("qwen3_moe", "dense12"), ("gpt_oss", "packed12"))
"""Families with batches that two context-parallel ranks can cut."""
CONTEXT = {
    2: [Case(CP2, "1f1b", batch, "fp64", family=family) for family, batch in CUT],
    4: [
        Case(mesh, "1f1b", batch, "fp64", family=family)
        for mesh, (family, batch) in zip(CUT_BY_TWO[:2], CUT[:2], strict=True)
    ],
}
"""Samples whose positions lie on two ranks."""
MORE_CONTEXT = {
    2: [
        *(Case(CP2, "1f1b", batch, "fp32") for batch in ("packed12", "dense12")),
        Case(CP2, "1f1b", "packed12", "fp64", family="qwen3_moe"),
        Case(CP2, "1f1b", "dense12", "fp64"),
        Case(CP2, "1f1b", "packed12", "fp64", family="dense"),
    ],
    4: [
        Case(mesh, "gpipe", batch, "fp64", family=family)
        for mesh, (family, batch) in zip(CUT_BY_TWO, (*CUT[1:], *CUT[1:]), strict=True)
    ],
}
"""More meshes with cp, both precisions, every family."""


AGAIN = {
    2: [
        Case(EP2, "1f1b", "packed", "fp64", recompute="full"),
        Case(PP2, "zbv", "dense", "fp64", recompute="stage"),
    ],
    4: [
        Case(MESHES[4][0], "dualpipev", "packed", "fp32", recompute="full"),
        Case(MESHES[4][1], "1f1b", "packed", "fp32", recompute="stage"),
        Case(MESHES[4][2], "interleaved_1f1b", "dense", "fp32", recompute="full"),
    ],
}
"""Activations computed again, on gathered parameters, between stages and between expert ranks (ENG-26)."""


DEEP = odd.deepseek_v2(name="deep", num_layers=9, num_experts=24, num_groups=6)
"""As many layers as eight stages want, and experts that two, four and eight ranks divide."""


def _wide(spec: str, schedule: str = "1f1b", block: int = BLOCK, length: str = "") -> list[Case]:
    mesh = MeshConfig(spec, **parse(spec))
    kinds = [f"{batch}{length}" for batch in BATCHES]
    return [Case(mesh, schedule, kind, "fp64", block=block, model=DEEP) for kind in kinds]


WIDE = [
    *_wide("pp4ep2"),
    *_wide("pp4ep2", "dualpipev", 1),
    *_wide("pp4dp2", "interleaved_1f1b", 1),
    *_wide("pp4cp2", "zbv", length="12"),
    *_wide("pp2ep4", "zbv"),
    *_wide("pp2dp2ep2", "dualpipev", 1),
    *_wide("pp2rep2ep2", "gpipe"),
    *_wide("pp2cp2ep2", "dualpipev", length="12"),
    *_wide("rep2dp2ep2", block=1),
    *_wide("dp2cp2ep2", length="12"),
    *_wide("cp4ep2", length="16"),
    *_wide("pp8"),
    *_wide("ep8", block=1),
    *_wide("dp8", block=1),
]
"""Eight ranks: three axes at a time, every schedule, and each axis alone."""


def matrix(ranks: int) -> list[Case]:
    """Every case on that many ranks; the schedule says nothing where there are no stages."""
    return [
        Case(mesh, schedule, batch, precision)
        for mesh in MESHES[ranks]
        for schedule in (SCHEDULES if mesh.pp > 1 else SCHEDULES[-1:])
        for batch in BATCHES
        for precision in PRECISIONS
    ] + [*EXTRA.get(ranks, []), *CONTEXT.get(ranks, []), *AGAIN.get(ranks, []), *FAMILIES[ranks]]


SHARED = [
    case
    for ranks in (1, 4)
    for case in matrix(ranks)
    if case.mesh.pp * case.mesh.cp == 1 and (ranks == 1 or case.precision == "fp64" or case.mesh.rep > 1)
]
"""What ranks of one world can do that share a card: one rank each by itself, and four over rep, dp and ep.

Stages (pp) and blocks of keys (cp) travel by send and receive, and gloo's take addresses of the host only."""


def make_config(case: Case) -> Config:
    """The run of a case."""
    return Config(
        model=case.model or MODELS[case.family],
        mesh=case.mesh,
        pipeline=PipelineConfig(case.schedule, STAGES_PER_RANK[case.schedule][0], reduce=case.reduce),
        recompute=RecomputeConfig(case.recompute),
        kernels=KernelsConfig(name="eager"),
        backend=BackendConfig(compile="none"),
        balance=BalanceConfig(kind=case.balance, coef=0.03, z_loss=0.02, force=case.force),
        precision=PrecisionConfig(name=case.precision),
        seed=0,
        sequence_length=length_of(case.batch),
        global_batch_size=SAMPLES,
        micro_batch_size=case.block,
    )
