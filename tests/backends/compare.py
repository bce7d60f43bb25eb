"""Three steps of one backend as the measure of another, by canonical name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from src.config import BackendConfig, Config
from src.trainer.backends.native import NativeBackend
from src.trainer.backends.registry import backend_class
from src.trainer.parallel.shards import local
from src.trainer.runtime import join
from tests.distributed import configs, laws
from tests.distributed.batches import blocks, step_batch
from tests.distributed.configs import MESHES, Case
from tests.distributed.laws import Report
from tests.distributed.reference import LEARNING_RATE, STEPS, Trace, sharpen

SINGLE = MESHES[1][0]


@dataclass(frozen=True)
class Choice:
    """A backend and what is changed in the odd model."""

    backend: str = "transformers"
    attention: str = "eager"
    experts: str = "eager"
    model: Mapping[str, Any] = field(default_factory=dict)

    def config(self, case: Case) -> Config:
        """The run of a case."""
        config = configs.make_config(case)
        keys = {} if self.backend == "native" else {"attn_implementation": self.attention}
        keys |= {} if self.backend == "native" else {"experts_implementation": self.experts}
        return replace(config, backend=BackendConfig(self.backend, **keys), model=self.changed(config))

    def changed(self, config: Config) -> Any:
        """The odd model with the changes."""
        return replace(config.model, **self.model)


@contextmanager
def chosen(choice: Choice) -> Iterator[None]:
    """The harness of law 1, for another backend than the native one."""
    found = backend_class(choice.backend)
    with (
        mock.patch.object(laws, "NativeBackend", found),
        mock.patch.object(laws, "make_config", choice.config),
    ):
        yield


def measure(case: Case, trace: Trace, choice: Choice) -> Report:
    """Three steps of the chosen backend against a trace; the limits are those of T-2, tighter than MOD-3."""
    with chosen(choice):
        return laws.measure(case, trace)


def trace_of(case: Case, choice: Choice) -> Trace:
    """Three steps of the chosen backend on one rank."""
    config = choice.config(case)
    backend: Any = backend_class(choice.backend).build(config, join(case.mesh, 0, 0, torch.device("cpu")))
    trace = Trace(initial=whole(backend))
    sharpen({name: view for name, e in backend.local_entries().items() for _, view in e.parts})
    for step in range(STEPS):
        one_step(case, backend, step, trace)
    trace.final = whole(backend)
    heldout = (backend.evaluate(m).double() for m in step_batch(case.batch, 0, 0, 1).micro_batches)
    trace.heldout = float(sum(heldout))
    trace.logits = backend.logits(blocks("dense", 0)[0].ids_BS)
    return trace


def one_step(case: Case, backend: NativeBackend, step: int, trace: Trace) -> None:
    """SGD with clipping, noted down."""
    batch = step_batch(case.batch, step, 0, 1)
    sums = backend.forward_backward(batch, torch.tensor(batch.target_tokens))
    norm = backend.norm_and_loss(sums.loss)[0]
    trace.losses.append(float(sums.loss))
    trace.aux.append(float(sums.aux))
    trace.z.append(float(sums.z))
    trace.counts.append(sums.counts.clone())
    trace.norms.append(float(norm))
    if step == 0:
        trace.max_norm = 0.1 * float(norm)
        gradients = {name: p.grad for name, p in backend.parameters.items() if p.grad is not None}
        trace.gradients = whole(backend, gradients)
    backend.scale_gradients((trace.max_norm / (norm + 1e-6)).clamp(max=1.0))
    for parameter in backend.parameters.values():
        local(parameter).sub_(LEARNING_RATE * local(parameter.grad))
        parameter.grad = None
    backend.finish_step(torch.zeros(()))


def whole(backend: Any, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Copies of the tensors of a backend on one rank."""
    return {name: e.parts[0][1].clone() for name, e in backend.local_entries(tensors).items()}
