"""One line per optimizer step in `metrics.jsonl` (LOG-1 to LOG-3).

Values stay on the device until a flush. A flush stacks the steps since the last one, sums the ranks' parts in
one reduction, and global rank 0 writes the lines.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from src.models.counts import flops_per_token
from src.trainer.health import REASONS
from src.trainer.parallel.balance import AUXILIARY
from src.trainer.parallel.layout import AXES
from src.trainer.state import Run
from src.trainer.step_time import StepTime

SCHEMA = 1
WARM_UP_STEPS = 2
"""Steps of an attempt whose speed is not reported: they hold first allocations and compilation."""
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16 FLOP/s by a part of the card's name, from data sheets; MFU is null elsewhere (LOG-5)."""


@dataclass(frozen=True)
class StepRecord:
    """What one step leaves on the device and on the host until the flush."""

    step: int
    """Number of finished steps, this one included."""
    sums: Tensor
    """fp64 [3]: this rank's parts of loss, auxiliary sum and z sum; the world's SUM is the global value."""
    globals: Tensor
    """fp64 [4], equal on all ranks: gradient norm, index of the reason to skip, target tokens, tokens."""
    counts: Tensor | None
    """int64 [MoE layers of the whole model, E]: rows this rank's layers sent to each expert."""
    bias: Tensor | None
    """Largest |bias| of this rank's routers after the step; None without `balance=bias`."""
    lr: float
    epoch: int
    step_time: StepTime
    data_time: float
    """Seconds that the step waited for data (LOAD-3)."""


def strict(value: Any) -> Any:
    """JSON without its non-standard numbers: not finite becomes `"nan"`, `"inf"`, `"-inf"`."""
    if isinstance(value, dict):
        return {k: strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def append_lines(path: Path, objects: list[dict[str, Any]]) -> None:
    """Append one strict JSON object a line, in one write; a half line left by a kill is ended first."""
    text = "".join(json.dumps(strict(o), allow_nan=False) + "\n" for o in objects)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, 2)
            text = text if file.read(1) == b"\n" else "\n" + text
        file.write(text.encode())


class Metrics:
    """Collects the records of a run and writes them at each flush."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._path = run.directory / "metrics.jsonl"
        self._records: list[StepRecord] = []
        self._first_step = run.step
        self._flops = flops_per_token(run.config.model, run.config.sequence_length)
        self._moe_layers = run.backend.moe_layers
        self.empty_steps: list[int] = []
        """Steps of the last flush without any target in the global batch (EVAL-4)."""

    def add(self, record: StepRecord) -> None:
        """Keep a step until the next flush."""
        self._records.append(record)

    def flush(self) -> list[dict[str, Any]]:
        """Reduce and write the kept steps; a collective that gives every rank the lines."""
        if not self._records:
            return []
        records, self._records = self._records, []
        runtime = self._run.runtime
        sums = runtime.sum_world(torch.stack([r.sums for r in records])).tolist()
        shared = torch.stack([r.globals for r in records]).tolist()
        self.empty_steps = [r.step for r, values in zip(records, shared, strict=True) if not values[2]]
        counts: list[Tensor | None] = [None] * len(records)
        if records[0].counts is not None:
            stacked = torch.stack([r.counts for r in records if r.counts is not None])
            counts = list(runtime.sum_world(stacked).cpu())
        biases: list[float | None] = [None] * len(records)
        if records[0].bias is not None:
            stacked = torch.stack([r.bias for r in records if r.bias is not None])
            biases = runtime.reduce(stacked, AXES, "max").tolist()
        peak = runtime.max_world(_peak_bytes(runtime.device))
        lines = [
            self._line(r, s, g, self._moe(c, b), peak)
            for r, s, g, c, b in zip(records, sums, shared, counts, biases, strict=True)
        ]
        if runtime.rank == 0:
            append_lines(self._path, lines)
        return lines

    def _line(
        self,
        record: StepRecord,
        sums: list[float],
        shared: list[float],
        moe: dict[str, Any] | None,
        peak: int,
    ) -> dict[str, Any]:
        run, config = self._run, self._run.config
        norm, reason, _, tokens = shared
        run.tokens_total += int(tokens)
        profiled = config.profile.covers(record.step)
        warm = record.step > self._first_step + WARM_UP_STEPS and not profiled
        seconds = record.step_time.seconds
        speed = tokens / seconds if warm else None
        layers = max(1, len(self._moe_layers))
        return {
            "schema": SCHEMA,
            "step": record.step,
            "attempt": run.attempt,
            "time": time.time(),
            "loss": sums[0],
            "aux_loss": sums[1] / layers if self._moe_layers and config.balance.kind in AUXILIARY else None,
            "z_loss": sums[2] / layers if self._moe_layers and config.balance.z_loss else None,
            "grad_norm": norm,
            "lr": record.lr,
            "tokens": int(tokens),
            "tokens_total": run.tokens_total,
            "samples_total": record.step * config.global_batch_size,
            "epoch": record.epoch,
            "skipped": bool(reason),
            "skip_reason": REASONS[int(reason)],
            "profiled": profiled,
            "step_time": seconds,
            "data_time": record.data_time,
            "tokens_per_s": speed,
            "mfu": self._mfu(speed),
            "mem_peak_bytes": peak,
            "bubble_s": None,
            "moe": moe,
        }

    def _moe(self, counts: Tensor | None, bias: float | None) -> dict[str, Any] | None:
        if counts is None or not self._moe_layers:
            return None
        return load_summary(counts, self._moe_layers) | {"bias_max": bias}

    def _mfu(self, tokens_per_s: float | None) -> float | None:
        runtime = self._run.runtime
        if tokens_per_s is None or runtime.device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(runtime.device)
        peaks = [flops for part, flops in PEAK_FLOPS.items() if part in name]
        return tokens_per_s * self._flops / (peaks[0] * runtime.world) if peaks else None


def load_summary(counts_LE: Tensor, layers: list[int]) -> dict[str, Any]:
    """How evenly the experts are used: per layer the shares, their entropy (1 is even), and max over mean.

    Args:
        counts_LE: rows per MoE layer and expert over the global batch.
        layers: global numbers of the MoE layers.
    """
    shares_LE = counts_LE.double() / counts_LE.sum(1, keepdim=True).clamp(min=1)
    entropy_L = -(shares_LE * shares_LE.clamp(min=1e-300).log()).sum(1) / math.log(counts_LE.shape[1])
    ratio_L = shares_LE.max(1).values * counts_LE.shape[1]
    per_layer = {
        str(layer): {
            "entropy": entropy_L[i].item(),
            "max_over_mean": ratio_L[i].item(),
            "dead": int((counts_LE[i] == 0).sum()),
            "load": [round(share, 5) for share in shares_LE[i].tolist()],
        }
        for i, layer in enumerate(layers)
    }
    return {
        "load_entropy": entropy_L.mean().item(),
        "load_max_over_mean": ratio_L.max().item(),
        "layers": per_layer,
    }


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
