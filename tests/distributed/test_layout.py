"""The mesh's arithmetic without a process: good and bad combinations, coordinates, slots (ENG-1, ENG-2)."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from src.config import BackendConfig, Config, MeshConfig, PipelineConfig
from src.errors import UserError
from src.models.schema import DeepseekV2Config, ModelConfig
from src.trainer.backends.registry import backend_class
from src.trainer.parallel import rules
from src.trainer.parallel.layout import auto, coordinates, expert_block, micro_batches, spec
from src.trainer.parallel.rules import check

MODEL = DeepseekV2Config(family="deepseek_v2", name="m", num_layers=6, num_experts=12)
DENSE = ModelConfig(family="dense", name="d", num_layers=6)


def make(
    model: ModelConfig = MODEL, batch: int = 24, micro: int = 2, length: int = 16, **keys: Any
) -> Config:
    """A config from mesh axes and pipeline keys."""
    axes = {k: v for k, v in keys.items() if k in ("pp", "rep", "dp", "cp", "ep", "tp")}
    pipeline = {k: v for k, v in keys.items() if k in ("schedule", "stages_per_rank", "overlap", "reduce")}
    mesh = MeshConfig(**axes)
    return Config(
        model=model,
        mesh=replace(mesh, spec=spec(mesh)),
        pipeline=PipelineConfig(**pipeline),
        global_batch_size=batch,
        micro_batch_size=micro,
        sequence_length=length,
        backend=BackendConfig(keys.get("backend", "native")),
    )


TABLE: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {}),
    ({"dp": 2}, {}),
    ({"rep": 3, "cp": 4}, {}),
    ({"ep": 4}, {}),
    ({"ep": 12}, {}),
    ({"pp": 6}, {}),
    ({"pp": 2, "ep": 2, "dp": 3}, {}),
    ({"pp": 2, "rep": 2, "ep": 3, "schedule": "gpipe"}, {}),
    ({"model": DENSE, "dp": 4}, {}),
    ({"reduce": "micro_batch", "dp": 2}, {}),
    ({"ep": 5, "batch": 20}, {"mesh.ep": "mesh.ep=4 or mesh.ep=6"}),
    ({"ep": 24, "batch": 48}, {"mesh.ep": "mesh.ep=12"}),
    ({"model": DENSE, "ep": 2}, {"mesh.ep": "mesh.ep=1"}),
    ({"dp": 5}, {"global_batch_size": "global_batch_size=20 or global_batch_size=30"}),
    ({"batch": 7}, {"global_batch_size": "global_batch_size=6 or global_batch_size=8"}),
    ({"batch": 1}, {"global_batch_size": "global_batch_size=2"}),
    ({"pp": 7}, {"mesh.pp": "mesh.pp=6"}),
    ({"pp": 4, "stages_per_rank": 2}, {"pipeline.stages_per_rank": "=1", "mesh.pp": "mesh.pp=3"}),
    ({"pp": 3, "ep": 5, "batch": 16}, {"mesh.ep": "mesh.ep=4", "global_batch_size": "=10 or"}),
    ({"cp": 2, "length": 18}, {"sequence_length": "sequence_length=16 or sequence_length=20"}),
    ({"tp": 2}, {"mesh.tp": "mesh.tp=1"}),
    ({"pp": 2, "model": replace(MODEL, tie_embeddings=True)}, {"mesh.pp": "mesh.pp=1 or pipeline=zbv"}),
    ({"dp": 2, "model": replace(MODEL, tie_embeddings=True)}, {}),
    ({"pp": 2, "schedule": "zbv"}, {"pipeline.stages_per_rank": "=2"}),
    ({"pp": 2, "schedule": "zbv", "stages_per_rank": 2, "batch": 2}, {}),
    ({"pp": 3, "schedule": "dualpipev", "stages_per_rank": 2, "batch": 12}, {}),
    ({"schedule": "dualpipev", "stages_per_rank": 2, "batch": 2}, {}),
    ({"schedule": "dualpipev", "stages_per_rank": 9}, {}),
    (
        {"pp": 4, "schedule": "interleaved_1f1b", "stages_per_rank": 2, "batch": 14},
        {"mesh.pp": "mesh.pp=3 or model.num_layers=8"},
    ),
    (
        {"pp": 2, "schedule": "zbv", "stages_per_rank": 2, "model": replace(MODEL, tie_embeddings=True)},
        {},
    ),
    (
        {"pp": 3, "schedule": "dualpipev", "stages_per_rank": 2, "batch": 8},
        {"global_batch_size": "global_batch_size=12"},
    ),
    (
        {"pp": 3, "schedule": "interleaved_1f1b", "stages_per_rank": 2, "batch": 14},
        {"global_batch_size": "=12 or global_batch_size=16"},
    ),
    ({"overlap": True}, {"pipeline.overlap": "false"}),
    ({"pp": 2, "reduce": "micro_batch"}, {"pipeline.reduce": "step"}),
    ({"dp": 0, "batch": -1}, {"mesh.dp": "=1", "global_batch_size": "=1"}),
    ({"backend": "megatron"}, {"backend": "backend=native"}),
]
"""Keys → nothing, or the keys that are refused, each with words of the values that work."""


@pytest.mark.parametrize(
    ("keys", "refused"), TABLE, ids=lambda value: ",".join(map(str, value)) if value else "good"
)
def test_combinations(keys: dict[str, Any], refused: dict[str, str]) -> None:
    """ENG-1: an accepted mesh has unique coordinates and disjoint slots; a refused one names fixes."""
    assert len(TABLE) >= 30
    config = make(**keys)
    problems = check(config)
    assert sorted(p.key for p in problems) == sorted(refused)
    for problem in problems:
        assert refused[problem.key] in problem.fix, problem
    if problems:
        return
    places = [coordinates(config.mesh, rank) for rank in range(config.mesh.world)]
    assert len(set(places)) == config.mesh.world
    step = config.micro_batch_size * config.mesh.data_ranks
    slots = [
        m * step + d * config.micro_batch_size
        for d in {p.data for p in places}
        for m in range(micro_batches(config))
    ]
    assert sorted(slots) == list(range(0, config.global_batch_size, config.micro_batch_size))


def test_rules_hold_under_optimisation() -> None:
    """ENG-1: no rule is an `assert`, which `python -O` leaves out."""
    tree = ast.parse(Path(rules.__file__).read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]


def test_ranks_are_row_major() -> None:
    """ENG-1: row-major over (pp, rep, dp, cp, ep, tp); pp, cp and tp do not enter the data index."""
    mesh = MeshConfig(pp=2, rep=2, dp=3, cp=2, ep=2)
    for rank in range(mesh.world):
        p = coordinates(mesh, rank)
        assert rank == (((p.pp * 2 + p.rep) * 3 + p.dp) * 2 + p.cp) * 2 + p.ep
        assert p.data == (p.rep * 3 + p.dp) * 2 + p.ep


def test_world_and_auto() -> None:
    """ENG-1: a fixed world must be the mesh's; auto fills dp only and never rounds down."""
    assert [p.key for p in check(make(pp=2), world=3)] == ["mesh"]
    assert check(make(pp=2), world=2) == []
    assert auto(make(pp=2, ep=3), 12) == replace(make(pp=2, ep=3).mesh, dp=2)
    with pytest.raises(UserError, match="use 6, 12 devices"):
        auto(make(pp=2, ep=3), 8)


def test_experts_are_contiguous_blocks() -> None:
    """ENG-2: ep rank r owns experts r·E/ep and on."""
    assert [list(expert_block(6, 3, rank)) for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_reserved_backends_are_refused_by_name() -> None:
    """DESIGN: megatron and automodel are reserved."""
    for name in ("megatron", "automodel"):
        with pytest.raises(UserError, match=f"'{name}' is reserved"):
            backend_class(name)
