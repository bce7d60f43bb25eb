"""A measured side as the object of BENCH-7, and such objects as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from src.bench import facts, record
from src.bench.clock import Ceilings, quantile
from src.bench.groups import Profile
from src.bench.side import GIB, Side
from src.models.counts import count, flops_per_token
from src.trainer.metrics import PEAK_FLOPS

ROUTING = {"none": "learned"}
"""`balance.force` → the word of BENCH-7, where it is another."""


def line_of(
    side: Side,
    peer: Side | None,
    ceilings: Ceilings,
    clock_before: float | None,
    traced: Profile | None,
    noise: float,
) -> dict[str, Any]:
    """The object of one side; without `peer` it has no ratio."""
    config, device, times = side.config, side.device, side.times
    tokens = config.global_batch_size * config.sequence_length
    flops = flops_per_token(config.model, config.sequence_length)
    speed = 1e3 * tokens / side.median
    return {
        "schema": record.SCHEMA,
        **facts.origin(),
        "card": facts.card(device, clock_before),
        "versions": facts.versions(device),
        "case": case_of(side, tokens),
        "kernels": side.kernels(),
        "step_ms": {
            "median": side.median,
            "p10": quantile(times, 0.1),
            "p90": quantile(times, 0.9),
            "all": times,
        },
        "tokens_per_s": speed,
        "flops_per_token": flops,
        "ceilings": {"gemm_tflops": ceilings.gemm_tflops, "copy_gbs": ceilings.copy_gbs},
        "mfu_datasheet": datasheet_mfu(speed * flops, device),
        "mfu_measured": speed * flops / ceilings.gemm_tflops / 1e12,
        "peak_gib": {kind: gib(side, kind) for kind in ("allocated", "reserved")},
        "share": None if traced is None else traced.share,
        "loss": {"first": side.loss(0), "last": side.loss(-1)},
        "peer": None if peer is None else {"name": peer.name, "version": peer.kernels()["transformers"]},
        "ratio": None if peer is None else ratio_of(side, peer),
        "noise": noise,
    }


def case_of(side: Side, tokens: int) -> dict[str, Any]:
    """What was measured."""
    config = side.config
    return {
        "model": config.model.name,
        "layers": config.model.num_layers,
        "params": count(config.model).total,
        "tokens": tokens,
        "seq": config.sequence_length,
        "micro_batch": config.micro_batch_size,
        "routing": ROUTING.get(config.balance.force, config.balance.force),
        "load_max_over_mean": side.load_max_over_mean(),
        "packed": side.is_packed(),
        "compile": side.compiled,
        "recompute": config.recompute.name,
        "precision": config.precision.name,
        "clip": config.optimizer.max_norm,
        "optimizer_in_step": True,
    }


def gib(side: Side, kind: str) -> float | None:
    """A peak in GiB; None on a CPU."""
    return side.peak[kind] / GIB if kind in side.peak else None


def ratio_of(side: Side, peer: Side) -> dict[str, float | None]:
    """How many times as fast as the peer, and how many times its memory."""
    mine, theirs = gib(side, "allocated"), gib(peer, "allocated")
    memory = mine / theirs if mine is not None and theirs is not None else None
    return {"speed": peer.median / side.median, "memory": memory}


def datasheet_mfu(flops: float, device: torch.device) -> float | None:
    """Of the card's dense bf16 rate by its data sheet; None for a card that has no row."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peaks = [peak for part, peak in PEAK_FLOPS.items() if part in name]
    return flops / peaks[0] if peaks else None


COLUMNS = (
    *("model", "tokens", "side", "compile", "precision", "clip"),
    *("ms", "tok/s", "MFU", "of gemm", "GiB", "speed", "memory"),
)
"""Of `row_of`: MFU is of the data sheet, `of gemm` of the measured product; ratios are to the peer."""


def table(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Results as aligned text."""
    rows = [COLUMNS, *(row_of(line) for line in lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def row_of(line: dict[str, Any]) -> tuple[str, ...]:
    """One side: what was measured, time, rates, memory, and the ratio to its peer."""
    case, ratio = line["case"], line["ratio"]
    return (
        f"{case['model']} {case['layers']}L",
        f"{case['tokens']:,}",
        record.side(line),
        case["compile"],
        case["precision"],
        shown(case["clip"], "{:g}"),
        f"{line['step_ms']['median']:.1f}",
        f"{line['tokens_per_s']:,.0f}",
        shown(line["mfu_datasheet"], "{:.1%}"),
        f"{line['mfu_measured']:.1%}",
        shown(line["peak_gib"]["allocated"], "{:.1f}"),
        "" if ratio is None else verdict(ratio["speed"], line["noise"]),
        "" if ratio is None else shown(ratio["memory"], "{:.2f}"),
    )


def verdict(speed: float, noise: float) -> str:
    """The ratio, or `none` where the sides differ by no more than one differs from itself (BENCH-3)."""
    return f"{speed:.3f}" if abs(speed - 1) > noise else f"none ({speed:.3f})"


def shown(value: float | None, pattern: str) -> str:
    """A number, or `-`."""
    return "-" if value is None else pattern.format(value)
