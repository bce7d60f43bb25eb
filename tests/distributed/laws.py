"""What a rank measures of law 1: every distance from the oracle, divided by its limit (T-2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from src.trainer.backends.native import NativeBackend
from src.trainer.parallel.shards import LocalEntry, local
from src.trainer.runtime import Runtime, join
from tests.distributed.batches import blocks, step_batch
from tests.distributed.configs import Case, Key, make_config
from tests.distributed.reference import LEARNING_RATE, STEPS, Trace, sharpen

GRADIENT = {"fp64": 1e-11, "fp32": 1e-5}
SCALAR = {"fp64": 1e-12, "fp32": 1e-6}
Report = dict[str, float]
"""What was compared → distance divided by limit; at most 1 where the law holds."""


def measure(case: Case, trace: Trace) -> Report:
    """Three steps on this rank's part of the mesh against the oracle; the same report on every rank."""
    runtime, backend, report = begin(case, trace)
    for step in range(STEPS):
        report |= one_step(case, runtime, backend, step, trace)
    limit = GRADIENT[case.precision]
    report |= {f"weights {n}": d / limit for n, d in distances(runtime, backend, trace.final)}
    logits = backend.logits(blocks("dense", 0)[0].ids_BS).cpu()
    report["logits"] = float((logits - trace.logits).norm() / trace.logits.norm()) / limit
    report["heldout"] = apart(heldout(case, runtime, backend), trace.heldout, SCALAR[case.precision])
    return report


def begin(case: Case, trace: Trace) -> tuple[Runtime, NativeBackend, Report]:
    """Build the backend and compare its initial weights, bitwise."""
    config = make_config(case)
    rank = dist.get_rank() if config.mesh.world > 1 else 0
    runtime = join(config.mesh, rank, rank, torch.device(case.device))
    backend = NativeBackend.build(config, runtime)
    report = {f"initial {n}": math.inf if d else 0.0 for n, d in distances(runtime, backend, trace.initial)}
    sharpen({n: view for n, e in backend.local_entries().items() for _, view in e.parts})
    return runtime, backend, report


def one_step(case: Case, runtime: Runtime, backend: NativeBackend, step: int, trace: Trace) -> Report:
    """One step of SGD with clipping, compared on the way."""
    limit = SCALAR[case.precision]
    coordinates = runtime.mesh.data_ranks
    batch = step_batch(case.batch, step, runtime.data_coordinate, coordinates, case.block)
    mine = batch.target_tokens if runtime.counts_samples else 0
    n_tokens = count_tokens(runtime, torch.tensor(mine, device=runtime.device))
    sums = backend.forward_backward(batch, n_tokens)
    scalars = torch.stack([sums.loss.double(), sums.aux.double(), sums.z.double()])
    loss, aux, z = runtime.sum_world(scalars).tolist()
    report = {
        f"loss {step}": apart(loss, trace.losses[step], limit),
        f"aux {step}": apart(aux, trace.aux[step], limit),
        f"z {step}": apart(z, trace.z[step], limit),
        f"counts {step}": 0.0
        if torch.equal(runtime.sum_world(sums.counts.clone()).cpu(), trace.counts[step])
        else math.inf,
    }
    norm = backend.norm_and_loss(sums.loss)[0]
    report[f"norm {step}"] = apart(float(norm), trace.norms[step], limit)
    if step == 0:
        gradients = {name: p.grad for name, p in backend.parameters.items() if p.grad is not None}
        missing = set(backend.parameters) - set(gradients)
        report |= {f"gradient {name} is None": math.inf for name in missing}
        zeros = {name: torch.zeros_like(backend.parameters[name]) for name in missing}
        found = distances(runtime, backend, trace.gradients, gradients | zeros)
        report |= {f"gradient {name}": d / GRADIENT[case.precision] for name, d in found}
    backend.scale_gradients((trace.max_norm / (norm + 1e-6)).clamp(max=1.0))
    for parameter in backend.parameters.values():
        if parameter.grad is not None:
            local(parameter).sub_(LEARNING_RATE * local(parameter.grad))
        parameter.grad = None
    backend.finish_step(torch.zeros((), device=runtime.device))
    return report


def count_tokens(runtime: Runtime, mine: Tensor) -> Tensor:
    """N_tok, from the counts of all data ranks; a seam for a mutation."""
    return runtime.sum_world(mine)


def heldout(case: Case, runtime: Runtime, backend: NativeBackend) -> float:
    """Σ cross entropy of the first global batch over all ranks, by the backend's evaluation."""
    batch = step_batch(case.batch, 0, runtime.data_coordinate, runtime.mesh.data_ranks, case.block)
    total = torch.zeros((), dtype=torch.float64, device=runtime.device)
    for micro_batch in batch.micro_batches:
        total += backend.evaluate(micro_batch).double()
    return float(runtime.sum_world(total))


def apart(value: float, expected: float, limit: float) -> float:
    """Relative distance of two numbers, in limits; infinite where not a number, or not 0 where it must be."""
    if expected == 0:
        return 0.0 if value == 0 else math.inf
    distance = abs(value - expected) / abs(expected) / limit
    return distance if math.isfinite(distance) else math.inf


def distances(
    runtime: Runtime,
    backend: NativeBackend,
    expected: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor] | None = None,
) -> list[tuple[str, float]]:
    """‖x − ref‖ / ‖ref‖ of each canonical tensor; infinite if elements miss or are not 0 where ref is.

    Every element must be held by exactly rep ranks.
    """
    parts = {name: compare(entry, expected[name]) for name, entry in backend.local_entries(tensors).items()}
    found: list[tuple[str, float]] = []
    gathered = runtime.gather_objects(parts)
    for name, reference in expected.items():
        held = [part[name] for part in gathered if name in part]
        difference, bad, elements = (
            (sum(values) for values in zip(*held, strict=True)) if held else (0.0, 0, 0)
        )
        size = float(reference.double().square().sum())
        whole = elements == reference.numel() * runtime.mesh.rep and not bad and math.isfinite(difference)
        relative = math.sqrt(difference / runtime.mesh.rep / size) if size else math.sqrt(difference)
        found.append((name, relative if whole else math.inf))
    return found


def compare(entry: LocalEntry, reference: Tensor) -> tuple[float, int, int]:
    """Squared distance, elements that are not 0 where the reference is, and elements held."""
    assert entry.shape == tuple(reference.shape), entry
    difference, bad, elements = 0.0, 0, 0
    for offsets, view in entry.parts:
        box = tuple(slice(o, o + n) for o, n in zip(offsets, view.shape, strict=True))
        expected, view = reference[box], view.cpu()
        difference += float((view.double() - expected.double()).square().sum())
        bad += int(((expected == 0) & (view != 0)).sum())
        elements += view.numel()
    return difference, bad, elements


def worst(report: Report) -> tuple[str, float]:
    """The comparison that came out worst."""
    return max(report.items(), key=lambda item: item[1])


def measure_all(cases: list[Case], traces: Mapping[Key, Trace]) -> list[tuple[str, Any, float]]:
    """Worst comparison of each case."""
    return [(str(case), *worst(measure(case, traces[case.key]))) for case in cases]
