"""Held-out loss, in nats per token and bits per byte, beside what counts alone reach (EVAL-1 to EVAL-5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from src.errors import UserError
from src.trainer.callbacks.base import Callback
from src.trainer.data.loader import heldout_batches
from src.trainer.metrics import append_lines
from src.trainer.state import Run


def evaluate(run: Run, listeners: Sequence[Callback] = ()) -> dict[str, Any]:
    """Evaluate the held-out samples and append a line to `evaluation.jsonl`; every rank calls it.

    Touches no random stream, counter, balance state or data position (EVAL-3).

    Returns:
        step, loss (nats per target token), bits_per_byte, frequencies, pairs, uniform (nats), tokens, bytes.

    Raises:
        UserError: 4, no held-out sample has a target.
    """
    runtime = run.runtime
    batches = heldout_batches(run.config, run.data, runtime.data_coordinate, run.config.mesh.data_ranks)
    totals = torch.zeros(2, dtype=torch.float64, device=runtime.device)
    for number, micro_batch in enumerate(batches):
        for listener in listeners:
            listener.heldout(run, number, micro_batch)
        totals[0] += run.backend.evaluate(micro_batch).double()
        totals[1] += micro_batch.target_tokens if runtime.counts_samples else 0
    nats, tokens = runtime.sum_world(totals).tolist()
    if not tokens:
        raise UserError(
            f"no target in the held-out samples of {run.data.heldout.source.name}; "
            "evaluation=none, or a larger evaluation.samples",
            code=4,
        )
    record = _record(run, nats / tokens, int(tokens))
    if runtime.rank == 0:
        append_lines(run.directory / "evaluation.jsonl", [record])
    return record


def _record(run: Run, loss: float, tokens: int) -> dict[str, Any]:
    lines = run.data.baselines
    per_token = lines.bytes_per_token
    return {
        "step": run.step,
        "loss": loss,
        "bits_per_byte": loss / (math.log(2) * per_token) if per_token else None,
        "frequencies": lines.frequencies,
        "pairs": lines.pairs,
        "uniform": lines.uniform,
        "tokens": tokens,
        "bytes": round(tokens * per_token) if per_token else None,
    }
