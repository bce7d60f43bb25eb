"""Held-out loss, in nats per token and bits per byte, beside what counts alone reach (EVAL-1 to EVAL-5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from src.config import Config
from src.errors import UserError
from src.trainer.backends.base import Backend
from src.trainer.callbacks.base import Callback
from src.trainer.data.batch import MicroBatch
from src.trainer.data.corpus import Data
from src.trainer.data.loader import heldout_batches
from src.trainer.metrics import append_lines
from src.trainer.runtime import Runtime
from src.trainer.state import Run


@dataclass(frozen=True)
class HeldOut:
    """What a model makes of held-out tokens."""

    nats: float
    """Sum of the cross entropy of all target tokens."""
    tokens: int
    """Target tokens."""


def _unseen(number: int, micro_batch: MicroBatch) -> None:
    """Nobody looks at the micro-batches."""


def evaluate(run: Run, listeners: Sequence[Callback] = ()) -> dict[str, Any]:
    """Evaluate the held-out samples and append a line to `evaluation.jsonl`; every rank calls it.

    Touches no random stream, counter, balance state or data position (EVAL-3).

    Returns:
        step, loss (nats per target token), bits_per_byte, frequencies, pairs, uniform (nats), tokens, bytes.

    Raises:
        UserError: 4, no held-out sample has a target.
    """

    def seen(number: int, micro_batch: MicroBatch) -> None:
        for listener in listeners:
            listener.heldout(run, number, micro_batch)

    record = record_of(run.data, run.step, sum_heldout(run.config, run.data, run.backend, run.runtime, seen))
    if run.runtime.rank == 0:
        append_lines(run.directory / "evaluation.jsonl", [record])
    return record


def sum_heldout(
    config: Config,
    data: Data,
    backend: Backend,
    runtime: Runtime,
    seen: Callable[[int, MicroBatch], None] = _unseen,
) -> HeldOut:
    """Sums over the held-out samples that `evaluation.samples` takes, equal on every rank; a collective.

    Args:
        seen: called with each micro-batch of this rank and its number, before it is evaluated.
    """
    batches = heldout_batches(config, data, runtime.data_coordinate, config.mesh.data_ranks)
    totals = torch.zeros(2, dtype=torch.float64, device=runtime.device)
    for number, micro_batch in enumerate(batches):
        seen(number, micro_batch)
        totals[0] += backend.evaluate(micro_batch).double()
        totals[1] += micro_batch.target_tokens if runtime.counts_samples else 0
    nats, tokens = runtime.sum_world(totals).tolist()
    return HeldOut(nats, int(tokens))


def record_of(data: Data, step: int, heldout: HeldOut) -> dict[str, Any]:
    """A line of `evaluation.jsonl`; raises `UserError` (4) if no token is a target."""
    if not heldout.tokens:
        raise UserError(
            f"no target in the held-out samples of {data.heldout.source.name}; "
            "evaluation=none, or a larger evaluation.samples",
            code=4,
        )
    lines, loss = data.baselines, heldout.nats / heldout.tokens
    per_token = lines.bytes_per_token
    return {
        "step": step,
        "loss": loss,
        "bits_per_byte": loss / (math.log(2) * per_token) if per_token else None,
        "frequencies": lines.frequencies,
        "pairs": lines.pairs,
        "uniform": lines.uniform,
        "tokens": heldout.tokens,
        "bytes": round(heldout.tokens * per_token) if per_token else None,
    }
