"""A measured side as the object of BENCH-7."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from src.bench import facts, record
from src.bench.clock import Ceilings, quantile
from src.bench.groups import Profile
from src.bench.side import GIB, Side
from src.config import Config
from src.models.counts import count, flops_per_token
from src.trainer.data.corpus import open_data
from src.trainer.data.synthetic import is_dense
from src.trainer.metrics import PEAK_FLOPS

ROUTING = {"none": "learned"}
"""`balance.force` → the word of BENCH-7, where it is another."""


@dataclass(frozen=True)
class Setting:
    """What all lines of a comparison share."""

    device: torch.device
    ceilings: Ceilings
    clock_before: float | None
    """Of the SMs, when measuring began."""
    comparison: dict[str, Any] = field(default_factory=dict)
    """Name of the case, overrides of ours alone, and what makes it the same comparison again."""


def line_of(
    side: Side, setting: Setting, engine: str, peer: Side | None, traced: Profile | None, noise: float
) -> dict[str, Any]:
    """The object of one side; without `peer` it has no ratio."""
    config, device, times = side.config, side.device, side.times
    speed = 1e3 * real_tokens(config) / side.median
    flops = counted_flops(config)["flops_per_token"]
    return {
        **_common(config, setting, engine),
        "case": case_of(config, side),
        "kernels": side.kernels(),
        "step_ms": {
            "median": side.median,
            "p10": quantile(times, 0.1),
            "p90": quantile(times, 0.9),
            "all": times,
        },
        "tokens_per_s": speed,
        "mfu_datasheet": datasheet_mfu(speed * flops, device),
        "mfu_measured": speed * flops / setting.ceilings.gemm_tflops / 1e12,
        "peak_gib": {kind: gib(side, kind) for kind in ("allocated", "reserved")},
        "share": None if traced is None else traced.share,
        "loss": {"first": side.loss(0), "last": side.loss(-1)},
        "peer": None if peer is None else peer_of(peer),
        "ratio": None if peer is None else ratio_of(side, peer),
        "noise": noise,
    }


def without_room(config: Config, setting: Setting, engine: str) -> dict[str, Any]:
    """The object of a side for which the device has too little memory (BENCH-6)."""
    unknown = ("step_ms", "tokens_per_s", "mfu_datasheet", "mfu_measured", "share", "loss", "peer", "ratio")
    return {
        **_common(config, setting, engine),
        "outcome": record.OUT_OF_MEMORY,
        "case": case_of(config, None),
        "kernels": {},
        "peak_gib": {"allocated": None, "reserved": None},
        **dict.fromkeys((*unknown, "noise")),
    }


def _common(config: Config, setting: Setting, engine: str) -> dict[str, Any]:
    ceilings = setting.ceilings
    return {
        "schema": record.SCHEMA,
        **facts.origin(),
        "card": facts.card(setting.device, setting.clock_before),
        "versions": facts.versions(setting.device),
        "outcome": record.MEASURED,
        "engine": engine,
        "comparison": setting.comparison,
        **counted_flops(config),
        "ceilings": {"gemm_tflops": ceilings.gemm_tflops, "copy_gbs": ceilings.copy_gbs},
    }


def case_of(config: Config, side: Side | None) -> dict[str, Any]:
    """What was measured; `side` is None if nothing ran."""
    return {
        "model": config.model.name,
        "layers": config.model.num_layers,
        "params": count(config.model).total,
        "tokens": config.global_batch_size * config.sequence_length,
        "seq": config.sequence_length,
        "micro_batch": config.micro_batch_size,
        "routing": ROUTING.get(config.balance.force, config.balance.force),
        "load_max_over_mean": None if side is None else side.load_max_over_mean(),
        "packed": not is_dense(config),
        "compile": config.backend.compile if side is None else side.compiled,
        "recompute": config.recompute.name,
        "precision": config.precision.name,
        "clip": config.optimizer.max_norm,
        "optimizer_in_step": True,
    }


def real_tokens(config: Config) -> float:
    """Tokens of a step on average, those of pads not counted."""
    tokens = config.global_batch_size * config.sequence_length
    if is_dense(config):
        return tokens
    plan = open_data(config).train.plan
    return tokens * plan.tokens / (len(plan) * config.sequence_length)


def counted_flops(config: Config) -> dict[str, int]:
    """FLOPs a trained token: attention over the keys of its own document, and as if a sample were one.

    A causal query of a document of n tokens sees n/2 keys in the mean, a packed token so Σn²/Σn halves.
    """
    length = config.sequence_length
    found = {"flops_per_token_by_position": flops_per_token(config.model, length)}
    if not is_dense(config):
        sizes = open_data(config).train.plan.pieces[:, 2].astype(float)
        length = round(float((sizes**2).sum() / sizes.sum()))
    return {"flops_per_token": flops_per_token(config.model, length), **found}


def peer_of(peer: Side) -> dict[str, Any]:
    """Who the other side is."""
    return {"name": peer.name, "version": peer.kernels().get("transformers"), "compile": peer.compiled}


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


def done_before(
    lines: Sequence[dict[str, Any]], expected: Mapping[str, Any], timed: int, profiles: bool
) -> str | None:
    """When a comparison was measured that need not be again: as many steps at least, by the same code.

    `expected` holds what must be equal: commit, versions, name of the card, comparison and engine.
    """
    for line in reversed(lines):
        found = {name: line[name] for name in ("commit", "versions", "comparison", "engine")}
        found["card"] = line["card"]["name"]
        if found == expected and _is_enough(line, timed, profiles):
            return str(line["date"])
    return None


def _is_enough(line: Mapping[str, Any], timed: int, profiles: bool) -> bool:
    if line["outcome"] == record.OUT_OF_MEMORY:
        return True
    return len(line["step_ms"]["all"]) >= timed and not (profiles and line["share"] is None)
