"""A bad value on one rank, and what all ranks make of it: nothing changes anywhere (ENG-27)."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from src.config import BalanceConfig, MeshConfig, OptimizerConfig, SpikeConfig
from src.trainer.backends.native import NativeBackend
from src.trainer.health import REASONS, Health
from src.trainer.optimizer import Optimizer, clip_factor
from src.trainer.parallel.shards import local
from src.trainer.runtime import Runtime, join
from tests.distributed import world
from tests.distributed.batches import step_batch
from tests.distributed.configs import MESHES, Case, make_config
from tests.distributed.test_engine import counted

DP2, _, EP2, PP2 = MESHES[2]
KINDS = ((DP2, "bias"), (EP2, "global_batch_lagged"), (PP2, "bias"))
"""Mesh → what the balance carries from step to step."""


class Ranks:
    """This rank's part of a run of AdamW with clipping, that skips what is not finite and what jumps."""

    def __init__(self, mesh: MeshConfig, kind: str) -> None:
        self.case = Case(mesh, "1f1b", "packed", "fp32")
        config = make_config(self.case)
        config.balance = BalanceConfig(kind=kind)
        config.optimizer = OptimizerConfig(kind="adamw", lr=0.01, max_norm=0.3)
        config.max_skips, config.nonfinite, config.spike = 4, "skip", SpikeConfig(window=2, deviations=30.0)
        self.runtime: Runtime = join(mesh, dist.get_rank(), dist.get_rank(), torch.device("cpu"))
        self.backend = NativeBackend.build(config, self.runtime)
        self.optimizer = Optimizer(
            config.optimizer, self.backend.parameters, self.backend.specs, copies=self.backend.copies
        )
        self.health = Health(config, torch.device("cpu"))
        self.number = 0

    def step(self, element: float = 0.0, loss: float = 0.0) -> str | None:
        """A step in which rank 1 adds `element` to one element of a gradient and `loss` to its loss."""
        batch = step_batch("packed", self.number, self.runtime.data_coordinate, self.runtime.mesh.data_ranks)
        self.number += 1
        sums = self.backend.forward_backward(batch, torch.tensor(200))
        if self.runtime.rank == 1:
            local(list(self.backend.parameters.values())[-1].grad).view(-1)[-1] += element
            sums.loss.add_(loss)
        with counted() as seen:
            norm, whole = self.backend.norm_and_loss(sums.loss)
            reason = self.health.judge(norm, whole)
        assert dict(seen) == {"all_reduce": 1}
        told = self.runtime.gather_objects((norm, whole, reason))
        same = [all(map(torch.equal, told[0], other)) or not bool(torch.isfinite(norm)) for other in told]
        assert all(same), told
        skip = (reason > 0).double()
        self.optimizer.step(0.01, clip_factor(norm, 0.3), skip)
        self.backend.finish_step(skip)
        return REASONS[int(reason)]

    def state(self) -> dict[str, Tensor]:
        """Everything that an update may change, window and counters of the guard aside."""
        tensors = {name: local(p) for name, p in self.backend.parameters.items()}
        for moment, held in self.optimizer.moments.items():
            tensors |= {f"{name}::{moment}": tensor for name, tensor in held.items()}
        tensors |= self.backend.extra_state() | {"updates": torch.tensor(self.optimizer.updates)}
        return {name: tensor.clone() for name, tensor in tensors.items()}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    return [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]


def bad_steps() -> dict[str, list[Any]]:
    """Mesh → reasons of eight steps, and what the bad ones changed."""
    found: dict[str, list[Any]] = {}
    for mesh, kind in KINDS:
        ranks = Ranks(mesh, kind)
        reasons, leaks = [ranks.step(), ranks.step()], []
        good = ranks.state()
        for bad in ({"element": math.nan}, {"loss": math.inf}, {"loss": 1e4}):
            reasons.append(ranks.step(**bad))
            leaks += changed(good, ranks.state())
        reasons += [ranks.step(element=1e4), ranks.step()]
        moved = set(changed(good, ranks.state())) & {*ranks.backend.extra_state(), "updates"}
        still = {*ranks.backend.extra_state(), "updates"} - moved
        with mock.patch.object(Health, "judge", return_value=torch.tensor(0)):
            ranks.step(element=math.nan)
        found[mesh.spec] = [reasons, leaks, sorted(still), bool(changed(good, ranks.state()))]
    return found


@pytest.mark.slow
def test_a_bad_value_of_one_rank_changes_nothing_on_any() -> None:
    """ENG-27: NaN in a gradient element, inf or a jump in one rank's loss: all state bitwise as before.

    Weights, moments, count of updates, lagged shares or bias; decided by the one reduction of the norm, and
    the same on all ranks. The next step goes on. The state notices where nothing is skipped.
    """
    expected = [*[None] * 2, "nonfinite", "nonfinite", "loss_spike", "norm_spike", None]
    for found in world.run(2, bad_steps):
        for spec, (reasons, leaks, still, notices) in found.items():
            assert (spec, reasons) == (spec, expected)
            assert leaks == []
            assert still == []
            assert notices
