"""The oracle of law 1: one process, no FSDP, no stages, a loop over experts, plain autograd (T-1).

It shares with the engine the layers, which `tests/models` holds to transformers, and the initial values of
single blocks of rows. Dispatch, auxiliary losses, token counts, norm, clipping and update are written
again, over the whole global batch at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from src.config import Config
from src.kernels.registry import resolve
from src.models.build import build, needs, param_specs, whole
from src.models.names import Entry, canonical
from src.models.protocol import Batch
from src.trainer.data.batch import MicroBatch
from src.trainer.parallel.init import BLOCK, draw
from tests.distributed.batches import BLOCK as SIZE
from tests.distributed.batches import blocks
from tests.distributed.forced import choices

LEARNING_RATE = 0.5
STEPS = 3
SHARPER = 8.0
"""Factor on router weights after initialisation: N(0, 0.02) gives scores too close together for T-6."""
MARGIN = 1e-6
"""Least distance from the last chosen to the first refused score: rounding flips no route (T-6)."""


@dataclass
class Trace:
    """Everything that a mesh must reproduce; tensors by canonical name."""

    initial: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step, before clipping."""
    final: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    aux: list[float] = field(default_factory=list)
    z: list[float] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    heldout: float = 0.0
    """Σ cross entropy of the first global batch after the last step."""
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    """Of the first dense micro-batch, after the last step."""
    max_norm: float = 0.0


class LoopDispatcher:
    """Stages 2 and 4 as a loop over experts with boolean masks; rows come home by (token, k)."""

    returns = True

    def __init__(self, experts: int) -> None:
        self._experts = experts

    def dispatch(
        self, tokens_TD: Tensor, ids_TK: Tensor
    ) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        places = [(ids_TK == e).nonzero(as_tuple=True) for e in range(self._experts)]
        counts = torch.tensor([len(token) for token, _ in places], dtype=torch.int32)
        return torch.cat([tokens_TD[token] for token, _ in places]), counts, places

    def combine(self, rows_RD: Tensor, plan: Any) -> Tensor:
        tokens = sum(len(token) for token, _ in plan)
        top_k = max((int(slot.max()) for _, slot in plan if len(slot)), default=0) + 1
        home = rows_RD.new_zeros(tokens // top_k, top_k, rows_RD.shape[1])
        token, slot = torch.cat([t for t, _ in plan]), torch.cat([s for _, s in plan])
        return home.index_put((token, slot), rows_RD).flatten(0, 1)

    def home(self, plan: Any) -> Tensor:
        return torch.arange(sum(len(token) for token, _ in plan))


class Recorder:
    """The balance hook as a witness: keeps what the router saw, changes nothing."""

    def __init__(self, choices: Callable[[int], Tensor | None] = lambda layer: None) -> None:
        """`choices` says which experts the tokens of a layer are sent to, if not those of the router."""
        self.seen: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.choices = choices

    def at(self, layer: int) -> Recorded:
        return Recorded(self.seen, layer)

    def forced(self, layer: int) -> Tensor | None:
        return self.choices(layer)


@dataclass(frozen=True)
class Recorded:
    """The hook of one layer."""

    seen: dict[int, tuple[Tensor, Tensor, Tensor]]
    layer: int

    def apply(self, logits_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self.seen[self.layer] = (logits_TE, scores_TE, ids_TK)
        return weights_TK


def train(config: Config, kind: str, size: int = SIZE) -> Trace:
    """Three steps of SGD with clipping over the whole global batch, in micro-batches of `size` samples."""
    dtype = {"fp32": torch.float32, "fp64": torch.float64}[config.precision.name]
    ops = resolve(config.kernels, torch.device("cpu"), dtype, config.determinism, needs(config.model))
    model = build(config.model, whole(config.model), ops).to(dtype)
    model.reset_buffers(torch.device("cpu"))
    views = canonical_views(config, model)
    fill(config, model, views)
    trace = Trace(initial=snapshot(views_of(model, views)))
    sharpen(views_of(model, views))
    lagged: dict[int, Tensor] = {}
    for step in range(STEPS):
        model.zero_grad()
        lagged = one_step(config, model, blocks(kind, step, size), lagged, trace)
        if step == 0:
            trace.gradients = {
                name: slice_of(model, entry, grad=True).clone() for name, entry in views.items()
            }
            trace.max_norm = 0.1 * trace.norms[0]
        update(model, trace.norms[-1], trace.max_norm)
    trace.final = snapshot(views_of(model, views))
    trace.heldout = heldout(config, model, kind)
    trace.logits = model.logits(forward(config, model, blocks("dense", 0)[0], None)).detach()
    return trace


def one_step(
    config: Config, model: Any, batch: list[MicroBatch], lagged: dict[int, Tensor], trace: Trace
) -> dict[int, Tensor]:
    """Forward and backward of the global batch; appends to `trace`, returns f of this step by layer."""
    n_tokens = sum(int((m.labels_BS != -100).sum()) for m in batch)
    zero = torch.zeros((), dtype=torch.float64)
    total, aux, z, counts, loss = 0.0, zero, zero, {}, 0.0
    for m in batch:
        recorder = Recorder(choices(config, m))
        hidden = forward(config, model, m, recorder)
        logits = model.logits(hidden).flatten(0, 1)
        ce = torch.nn.functional.cross_entropy(
            logits, m.labels_BS.flatten(), ignore_index=-100, reduction="sum"
        )
        loss = loss + ce / n_tokens
        for layer, (logits_TE, scores_TE, ids_TK) in recorder.seen.items():
            if config.balance.force == "none":
                check_margin(config, scores_TE)
            units = auxiliary(config, m, logits_TE, scores_TE, ids_TK, lagged.get(layer), n_tokens)
            aux, z = aux + units[0], z + units[1]
            counts[layer] = counts.get(layer, 0) + units[2]
    total = loss + config.balance.coef * aux + config.balance.z_loss * z
    total.backward()
    trace.losses.append(float(loss.detach()))
    trace.aux.append(float(aux.detach()))
    trace.z.append(float(z.detach()))
    rows = [counts[layer] for layer in sorted(counts)]
    empty = torch.zeros(0, config.model.num_experts, dtype=torch.int64)
    trace.counts.append(torch.stack(rows) if rows else empty)
    norms = [p.grad.double().norm() for p in model.parameters()]
    trace.norms.append(float(torch.stack(norms).norm()))
    return {layer: c.double() / c.sum() for layer, c in counts.items()}


def auxiliary(
    config: Config,
    m: MicroBatch,
    logits_TE: Tensor,
    scores_TE: Tensor,
    ids_TK: Tensor,
    lagged_E: Tensor | None,
    n_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """ENG-24 for one micro-batch and layer, unit by unit: measure, z-loss, counts of real tokens [E]."""
    samples, experts = m.ids_BS.shape[0], scores_TE.shape[1]
    real_BS = torch.ones_like(m.ids_BS, dtype=torch.bool) if m.real_BS is None else m.real_BS
    onehot_TE = torch.zeros_like(scores_TE).scatter(1, ids_TK.long(), 1.0)
    by_sample = [t.view(samples, -1, experts) for t in (scores_TE, onehot_TE, logits_TE)]
    whole_unit = [list(range(samples))]
    units = [[row] for row in range(samples)] if config.balance.kind == "sequence" else whole_unit
    aux = sum(_measure(config, m, by_sample, real_BS, unit, lagged_E) for unit in units) / n_tokens
    z = (torch.logsumexp(by_sample[2][real_BS], -1) ** 2).mean() * (m.labels_BS != -100).sum() / n_tokens
    return torch.as_tensor(aux), z, by_sample[1][real_BS].sum(0).long()


def _measure(
    config: Config,
    m: MicroBatch,
    by_sample: list[Tensor],
    real_BS: Tensor,
    unit: list[int],
    lagged_E: Tensor | None,
) -> Tensor:
    """n_j · E · Σ f_i P_i of one unit."""
    scores, onehot = (t[unit][real_BS[unit]] for t in by_sample[:2])
    experts, top_k = scores.shape[1], int(onehot[0].sum())
    share_E = onehot.sum(0) / (top_k * len(onehot))
    if config.balance.kind == "global_batch_lagged":
        share_E = torch.full_like(share_E, 1 / experts) if lagged_E is None else lagged_E.to(share_E.dtype)
    labels = (m.labels_BS[unit] != -100).sum()
    return labels * experts * (share_E * scores.mean(0)).sum()


def check_margin(config: Config, scores_TE: Tensor) -> None:
    """No route of the fixture hangs on rounding, neither the choice of groups nor that of experts (T-6)."""
    model: Any = config.model
    scores = scores_TE.detach().double()
    gaps = [margin(scores, model.top_k)]
    if getattr(model, "routing", None) == "group_limited_greedy":
        groups = scores.view(len(scores), model.num_groups, -1)
        kept = groups.max(2).values.topk(model.groups_kept, 1).indices
        inside = groups.gather(1, kept[..., None].expand(-1, -1, groups.shape[2])).flatten(1)
        gaps = [margin(groups.max(2).values, model.groups_kept), margin(inside, model.top_k)]
    smallest = min(gaps)
    assert smallest > (MARGIN if config.precision.name == "fp32" else 0), (
        f"choose another seed: margin {smallest}"
    )


def margin(scores: Tensor, kept: int) -> float:
    """Least distance from the last of the `kept` largest of a row to the next."""
    ordered = scores.sort(1, descending=True).values
    return float((ordered[:, kept - 1] - ordered[:, kept]).min())


def forward(config: Config, model: Any, m: MicroBatch, balance: Any) -> Tensor:
    """Hidden states of a micro-batch."""
    batch = Batch(m.positions_BS, m.cu_seqlens, m.documents_BS, m.real_BS, balance)
    hidden: Tensor = model(m.ids_BS, batch, LoopDispatcher(config.model.num_experts))
    return hidden


@torch.no_grad()
def heldout(config: Config, model: Any, kind: str) -> float:
    """Σ cross entropy of the first global batch."""
    total = 0.0
    for m in blocks(kind, 0):
        logits = model.logits(forward(config, model, m, None)).flatten(0, 1)
        labels = m.labels_BS.flatten()
        total += float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
    return total


@torch.no_grad()
def update(model: Any, norm: float, max_norm: float) -> None:
    """SGD with clipping by the global norm (ENG-7)."""
    factor = min(1.0, max_norm / (norm + 1e-6))
    for parameter in model.parameters():
        parameter -= LEARNING_RATE * factor * parameter.grad


def canonical_views(config: Config, model: Any) -> dict[str, Entry]:
    """Canonical name → entry; every parameter of the model is covered."""
    entries = canonical(config.model)
    assert {e.parameter for e in entries.values()} == set(dict(model.named_parameters()))
    return entries


def slice_of(model: Any, entry: Entry, grad: bool = False) -> Tensor:
    """The part of a parameter, or of its gradient, that an entry names."""
    parameter = model.get_parameter(entry.parameter)
    tensor = parameter.grad if grad else parameter.detach()
    assert tensor is not None, entry
    matrix = tensor if entry.expert is None else tensor[entry.expert]
    return matrix if entry.rows is None else matrix[entry.rows]


def views_of(model: Any, entries: dict[str, Entry]) -> dict[str, Tensor]:
    return {name: slice_of(model, entry) for name, entry in entries.items()}


def sharpen(views: Mapping[str, Tensor]) -> None:
    """Spread the router's scores, exactly the same in any dtype and on any shard."""
    for name, view in views.items():
        if name.endswith(("mlp.gate.weight", "mlp.router.weight")):
            view.mul_(SHARPER)


def snapshot(views: Any) -> dict[str, Tensor]:
    return {name: view.clone() for name, view in views.items()}


@torch.no_grad()
def fill(config: Config, model: Any, entries: dict[str, Entry]) -> None:
    """Initial values by canonical name, whole tensors at a time."""
    specs = param_specs(model)
    for name, entry in entries.items():
        spec, view = specs[entry.parameter], slice_of(model, entry)
        if spec.init == "normal":
            count = -(-entry.shape[0] // BLOCK)
            view.copy_(
                torch.cat([draw(config, name, entry.shape, spec.std, block) for block in range(count)])
            )
        else:
            view.fill_(1.0 if spec.init == "ones" else 0.0)
