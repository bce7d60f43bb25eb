"""What a rank really holds: bytes of its states by tensor, of a step's fullest moment by the allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from src.config import Config
from src.trainer.backends.native import NativeBackend
from src.trainer.data.corpus import open_data
from src.trainer.data.loader import Loader
from src.trainer.optimizer import Optimizer
from src.trainer.parallel.precision import precision_of
from src.trainer.parallel.shards import local
from src.trainer.runtime import Runtime

STEPS = 5
"""Steps of which the leanest counts: a thread of gloo's gives back what it sent when it gets to it, up to a
fifth of a step's peak later than the step itself needs it."""


@dataclass(frozen=True)
class Use:
    """Bytes of one rank."""

    weights: int
    """Parameters, their copies in the dtype of compute, and their lower halves."""
    gradients: int
    """When the update begins."""
    optimizer: int
    beside: int
    """At the fullest moment of a later step, weights and moments left out."""


def use_of(config: Config, runtime: Runtime) -> Use:
    """Build a rank, step twice."""
    backend = NativeBackend.build(config, runtime)
    optimizer = Optimizer(
        config.optimizer, backend.parameters, backend.specs, backend.ops.adamw, backend.copies,
        backend.remainders, precision_of(config, runtime.device).first_moment,
    )  # fmt: skip
    loader = Loader(config, open_data(config, None), runtime.data_coordinate, config.mesh.data_ranks, 0)
    batch, found = loader.read(0), {}

    def step() -> None:
        mine = torch.tensor(batch.target_tokens if runtime.counts_samples else 0)
        sums = backend.forward_backward(batch, runtime.sum_world(mine))
        backend.norm_and_loss(sums.loss)
        gradients = (p.grad for p in backend.parameters.values())
        found["gradients"] = size(local(g) for g in gradients if g is not None)
        optimizer.step(1e-3, None, torch.zeros(()))
        optimizer.zero_grad()

    step()
    held = (backend.parameters, backend.copies, backend.remainders)
    return Use(
        weights=sum(size(map(local, part.values())) for part in held),
        gradients=found["gradients"],
        optimizer=sum(size(moment.values()) for moment in optimizer.moments.values()),
        beside=min(peak_of(step) for _ in range(STEPS if config.mesh.world > 1 else 1)),
    )


def size(tensors: Iterable[Tensor]) -> int:
    """Bytes of the numbers of some tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def peak_of(work: Callable[[], object]) -> int:
    """Most bytes that `work` allocates on the CPU at one time, by the events of torch's profiler.

    What others have left goes first: freed meanwhile, it would be taken off.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    results: Any = found.profiler
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
