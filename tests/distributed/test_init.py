"""Initial weights by name, whatever mesh, order or memory; shards that do not divide (ENG-2, ENG-9)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from src.config import Config, MeshConfig
from src.trainer.backends.native import NativeBackend
from src.trainer.parallel import init
from src.trainer.parallel.init import BLOCK, draw, initialise
from src.trainer.parallel.shards import local, shard_of
from src.trainer.runtime import Runtime, join
from tests.distributed import world
from tests.distributed.configs import MESHES, Case, make_config
from tests.distributed.laws import distances
from tests.distributed.reference import Trace, train
from tests.models import odd


def uneven_config(ranks: int) -> Config:
    """Six experts on 4 or 5 shards: `gate_up` [6,18,45] has empty ones, `down` [6,45,9] is cut across."""
    config = make_config(Case(MeshConfig(f"dp{ranks}", dp=ranks), "1f1b", "dense", "fp32"))
    config.model = odd.deepseek_v2(num_experts=6, num_groups=3, num_layers=2)
    return config


def build(config: Config) -> tuple[Runtime, NativeBackend]:
    rank = dist.get_rank() if config.mesh.world > 1 else 0
    runtime = join(config.mesh, rank, rank, torch.device("cpu"))
    return runtime, NativeBackend.build(config, runtime)


def check_uneven(initial: dict[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Every element is held once and is the oracle's; returns where the stacks are cut on this rank."""
    config = uneven_config(dist.get_world_size())
    runtime, backend = build(config)
    assert {name: d for name, d in distances(runtime, backend, initial) if d} == {}
    stacks = {n: p for n, p in backend.parameters.items() if backend.specs[n].expert}
    return {name.rsplit(".", 1)[1]: shard_of(parameter) for name, parameter in stacks.items()}


def uneven_reference() -> Trace:
    config = uneven_config(1)
    config.mesh = MeshConfig()
    return train(config, "dense")


def test_shards_that_do_not_divide() -> None:
    """ENG-2: a stack is cut on its first dimension, else its second if that divides, else unevenly."""
    (trace,) = world.run(1, uneven_reference)
    four, five = (world.run(ranks, check_uneven, trace.initial) for ranks in (4, 5))
    assert [cut["gate_up"] for cut in four] == [(0, 0), (0, 2), (0, 4), (0, 6)]
    assert [cut["gate_up"] for cut in five] == [(0, 0), (0, 2), (0, 4), (0, 6), (0, 6)]
    assert [cut["down"] for cut in five] == [(1, 9 * rank) for rank in range(5)]


def test_memory_and_order_do_not_matter() -> None:
    """ENG-9: memory full of NaN and names in reverse give the same bits; no two matrices are equal."""
    config = make_config(Case(MESHES[1][0], "1f1b", "dense", "fp32"))
    _, backend = build(config)
    first = {name: local(p).clone() for name, p in backend.parameters.items()}
    for parameter in backend.parameters.values():
        local(parameter).fill_(torch.nan)
    initialise(config, dict(reversed(backend.local_entries().items())), backend.specs)
    assert all(torch.equal(local(p), first[name]) for name, p in backend.parameters.items())
    rows = [view for e in backend.local_entries().values() for _, view in e.parts if view.dim() == 2]
    corners = [tuple(view.flatten()[:4].tolist()) for view in rows]
    assert len(set(corners)) == len(corners)


def test_blocks_and_seeds() -> None:
    """ENG-9, SEED-1: values depend on seed, name and block of 1,024 rows, and follow N(0, std)."""
    config = make_config(Case(MESHES[1][0], "1f1b", "dense", "fp32"))
    shape = (BLOCK + 7, 5)
    first, second = (draw(config, "a", shape, 0.02, block) for block in (0, 1))
    assert first.shape == (BLOCK, 5)
    assert second.shape == (7, 5)
    assert torch.equal(first, draw(config, "a", shape, 0.02, 0))
    assert not torch.equal(first[:7], second)
    assert not torch.equal(first, draw(config, "b", shape, 0.02, 0))
    config.seed += 1
    assert not torch.equal(first, draw(config, "a", shape, 0.02, 0))
    assert abs(float(first.std()) / 0.02 - 1) < 0.05


def test_threads_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """ENG-9: three threads draw what one draws, into the same rows."""
    config = uneven_config(1)
    config.mesh = MeshConfig()
    drawn = []
    for count in (1, 3):
        monkeypatch.setattr(init, "THREADS", count)
        drawn.append(build(config)[1].parameters)
    assert all(one.equal(drawn[1][name]) for name, one in drawn[0].items())
