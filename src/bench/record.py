"""A line of `benchmarks/<script>.jsonl`, one a side and case: its fields, and how to read one (BENCH-7).

Lines of schema 1, which lack some fields, stay as they are and are read as ones of schema 2 by `upgraded`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from src.bench.groups import GROUPS

SCHEMA = 2
READABLE = (1, 2)
MEASURED, OUT_OF_MEMORY = "measured", "out_of_memory"

NUMBER, TEXT, FLAG = (int, float), (str,), (bool,)
MAYBE_NUMBER, MAYBE_TEXT, MAYBE_FLAG = (*NUMBER, NoneType), (str, NoneType), (bool, NoneType)


class Maybe:
    """A section that may be null."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields


FIELDS: dict[str, Any] = {
    "schema": (int,),
    "date": TEXT,
    "commit": MAYBE_TEXT,
    "dirty": MAYBE_FLAG,
    "command": TEXT,
    "card": {
        "name": TEXT,
        "memory_gib": NUMBER,
        "power_limit_w": MAYBE_NUMBER,
        "sm_clock_mhz": {"before": MAYBE_NUMBER, "after": MAYBE_NUMBER},
    },
    "versions": {
        "python": TEXT,
        "torch": TEXT,
        "cuda": MAYBE_TEXT,
        "cudnn": (int, NoneType),
        "triton": MAYBE_TEXT,
        "driver": MAYBE_TEXT,
        "transformers": MAYBE_TEXT,
        "flash_attn_4": MAYBE_TEXT,
    },
    "case": {
        "model": TEXT,
        "layers": (int,),
        "params": (int,),
        "tokens": (int,),
        "seq": (int,),
        "micro_batch": (int,),
        "routing": ("learned", "even", "uniform", "dirichlet"),
        "load_max_over_mean": MAYBE_NUMBER,
        "packed": FLAG,
        "compile": ("none", "layers", "model", "auto"),
        "recompute": TEXT,
        "precision": TEXT,
        "clip": MAYBE_NUMBER,
        "optimizer_in_step": FLAG,
    },
    "kernels": (dict,),
    "outcome": (MEASURED, OUT_OF_MEMORY),
    "engine": ("native", "eager", "plain", "transformers"),
    "comparison": {"name": TEXT, "ours": (list,), "identity": MAYBE_TEXT, "code": MAYBE_TEXT},
    "step_ms": Maybe({"median": NUMBER, "p10": NUMBER, "p90": NUMBER, "all": (list,)}),
    "tokens_per_s": MAYBE_NUMBER,
    "flops_per_token": (int,),
    "flops_per_token_by_position": (int,),
    "ceilings": {"gemm_tflops": NUMBER, "copy_gbs": NUMBER},
    "mfu_datasheet": MAYBE_NUMBER,
    "mfu_measured": MAYBE_NUMBER,
    "peak_gib": {"allocated": MAYBE_NUMBER, "reserved": MAYBE_NUMBER},
    "share": Maybe(dict.fromkeys(GROUPS, NUMBER)),
    "loss": Maybe({"first": NUMBER, "last": NUMBER}),
    "peer": Maybe({"name": TEXT, "version": MAYBE_TEXT, "compile": MAYBE_TEXT}),
    "ratio": Maybe({"speed": NUMBER, "memory": MAYBE_NUMBER}),
    "noise": MAYBE_NUMBER,
}
"""Field → the types it takes, the texts it is one of, or the fields inside it."""


def upgraded(line: Mapping[str, Any], following: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A line of any readable schema as one of the newest; `following` is the next line of its file.

    Of schema 1 a peer's own line follows ours, which alone says how the peer was compiled.
    """
    if line["schema"] == SCHEMA:
        return dict(line)
    peer = line["peer"]
    if peer is not None:
        peer = {**peer, "compile": None if following is None else following["case"]["compile"]}
    return {
        **line,
        "schema": SCHEMA,
        "outcome": MEASURED,
        "engine": "transformers" if "transformers" in line["kernels"] else "native",
        "comparison": {"name": line["case"]["model"], "ours": [], "identity": None, "code": None},
        "flops_per_token_by_position": line["flops_per_token"],
        "peer": peer,
    }


def problems(line: Any, fields: Mapping[str, Any] = FIELDS, prefix: str = "") -> Iterator[str]:
    """What is wrong with an object: fields that are missing, unknown, or of another type."""
    if not isinstance(line, dict):
        yield f"{prefix or 'line'}: {line!r} is no object"
        return
    for name in sorted({*fields, *line}):
        key = f"{prefix}{name}"
        if name not in line or name not in fields:
            yield f"{key}: {'missing' if name in fields else 'unknown'}"
            continue
        yield from _wrong(key, line[name], fields[name])


def _wrong(key: str, value: Any, wanted: Any) -> Iterator[str]:
    if isinstance(wanted, Maybe):
        if value is not None:
            yield from problems(value, wanted.fields, f"{key}.")
    elif isinstance(wanted, dict):
        yield from problems(value, wanted, f"{key}.")
    elif isinstance(wanted[0], str):
        if value not in wanted:
            yield f"{key}: {value!r} is none of {', '.join(wanted)}"
    elif not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        yield f"{key}: {value!r} is no {' or '.join(kind.__name__ for kind in wanted)}"


def read(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of results, as they stand there."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def read_current(path: Path) -> list[dict[str, Any]]:
    """The objects of a file that can be read, as ones of the newest schema; none if there is no file."""
    lines = read(path) if path.is_file() else []
    following: Sequence[dict[str, Any] | None] = [*lines, None][1:]
    pairs = zip(lines, following, strict=True)
    return [upgraded(line, after) for line, after in pairs if line["schema"] in READABLE]


def append(path: Path, lines: list[dict[str, Any]], fields: Mapping[str, Any] = FIELDS) -> None:
    """Add results after the ones that are there.

    Raises:
        ValueError: a line is not what `fields` says.
    """
    wrong = [problem for line in lines for problem in problems(line, fields)]
    if wrong:
        raise ValueError("; ".join(wrong))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
