"""What forbids loading a checkpoint into a run, all of it at once (CKPT-9).

DCP alone ignores entries that nobody asked for and casts dtypes without a word, so names, shapes and dtypes
of both sides are compared before anything is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from src import resume
from src.config import Config
from src.digest import flatten
from src.errors import Problem
from src.trainer.checkpoint.agree import everyone
from src.trainer.checkpoint.directory import Meta, TensorInfo
from src.trainer.checkpoint.shards import Shards
from src.trainer.runtime import Runtime

FIRST_MOMENT, CAST = "::exp_avg", {"float32", "bfloat16"}
"""What may be saved in one of these dtypes and go on in the other (`precision.first_moment`)."""
SHOWN = 3
"""Names of one pattern that a message spells out."""


@dataclass(frozen=True, order=True)
class TensorDifference:
    """One name that one side lacks or has otherwise."""

    kind: str
    """``missing`` in the checkpoint, ``unexpected`` in it, or another ``shape`` or ``dtype``."""
    name: str
    saved: str = ""
    wanted: str = ""


def config_problems(meta: Meta, config: Config, data_key: str | None) -> list[Problem]:
    """Keys that RUN-9 does not let a resume change, and the data artifact."""
    _, refused = resume.differences(meta.config, flatten(config))
    problems = [
        Problem(d.key, f"{d.old!r} in the checkpoint, {d.new!r} in this run", f"{d.key}={d.old}", "RUN-9")
        for d in refused
    ]
    if meta.data_key != data_key and not config.data.allow_change:
        message = f"key {meta.data_key} in the checkpoint, {data_key} in this run"
        fix = "data.allow_change=true goes on with other data"
        problems.append(Problem("data", message, fix, "PREP-6"))
    return problems


def tensor_problems(
    meta: Meta, tensors: Mapping[str, Shards], moments: Sequence[str], runtime: Runtime
) -> list[Problem]:
    """Names, shapes and dtypes that differ between the checkpoint and all ranks together; a collective.

    Args:
        moments: moments the optimizer keeps. One that only one side has is a change of the optimizer's
            options: it starts at zero, or is left unread.
    """
    saved = {n: info for n, info in meta.tensors.items() if _is_compared(n, moments)}
    wanted = {n: shards for n, shards in tensors.items() if _is_compared(n, meta.moments)}
    return describe(tensor_differences(saved, wanted, runtime))


def tensor_differences(
    saved: Mapping[str, TensorInfo], wanted: Mapping[str, Shards], runtime: Runtime
) -> set[TensorDifference]:
    """What all ranks together hold otherwise than was saved; a collective."""
    parts = everyone(runtime, lambda: _local_differences(saved, wanted))
    found = {difference for part in parts for difference in part}
    return found | {TensorDifference("unexpected", name) for name in _held_by_none(saved, wanted, runtime)}


def _is_compared(name: str, moments: Sequence[str]) -> bool:
    return "::" not in name or name.rpartition("::")[2] in moments


def _local_differences(
    saved: Mapping[str, TensorInfo], wanted: Mapping[str, Shards]
) -> list[TensorDifference]:
    found = []
    for name, shards in wanted.items():
        info = saved.get(name)
        if info is None:
            found.append(TensorDifference("missing", name))
            continue
        dtype = str(shards.dtype).removeprefix("torch.")
        if info.shape != shards.shape:
            found.append(TensorDifference("shape", name, str(info.shape), str(shards.shape)))
        if info.dtype != dtype and not (name.endswith(FIRST_MOMENT) and {info.dtype, dtype} == CAST):
            found.append(TensorDifference("dtype", name, info.dtype, dtype))
    return found


def _held_by_none(saved: Mapping[str, TensorInfo], wanted: Mapping[str, Any], runtime: Runtime) -> list[str]:
    """Saved names of which no rank holds a part; ranks add up a mark per name instead of sending names."""
    names = sorted(saved)
    marks = torch.tensor([name in wanted for name in names], dtype=torch.int32, device=runtime.device)
    total = runtime.sum_world(marks).tolist() if names else []
    return [name for name, count in zip(names, total, strict=True) if not count]


_TEXTS = {
    "missing": "in the model, not in the checkpoint",
    "unexpected": "in the checkpoint, not in the model",
    "shape": "shape {saved} in the checkpoint, {wanted} in the model",
    "dtype": "dtype {saved} in the checkpoint, {wanted} in the model",
}


def describe(differences: set[TensorDifference]) -> list[Problem]:
    """One problem per kind and pattern of names; names that differ in numbers are one pattern."""
    groups: dict[tuple[str, ...], list[TensorDifference]] = {}
    for difference in sorted(differences, key=lambda d: (d.kind, _natural(d.name))):
        pattern = re.sub(r"\d+", "*", difference.name)
        key = (difference.kind, pattern, difference.saved, difference.wanted)
        groups.setdefault(key, []).append(difference)
    return [_problem(group) for group in groups.values()]


def _natural(name: str) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _problem(group: Sequence[TensorDifference]) -> Problem:
    first = group[0]
    names = ", ".join(d.name for d in group[:SHOWN])
    rest = f" and {len(group) - SHOWN} more like them" if len(group) > SHOWN else ""
    text = _TEXTS[first.kind].format(saved=first.saved, wanted=first.wanted)
    return Problem(names + rest, text, rule="CKPT-9")
