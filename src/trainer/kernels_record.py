"""`kernels.json`: written once, after every rank has said what it chose (REG-3)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from src.errors import Problem, UserError
from src.trainer.runtime import Runtime

FIX = "give every node the same packages and the same kind of card"


def write_kernels(directory: Path, runtime: Runtime, record: Mapping[str, Any]) -> None:
    """Write the record, if all ranks have the same; on all of them `UserError` (3) if not.

    Cards may have other names, since nothing is chosen by these.
    """
    differing = list(differences(runtime.gather_objects(dict(parts(record)))))
    if differing:
        raise UserError([Problem("kernels", text, FIX, "REG-3") for text in differing], code=3)
    if runtime.rank == 0:
        (directory / "kernels.json").write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


def parts(record: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Operation, or other part of the record → what was chosen for it, and a digest of all that is said."""
    for name, value in record.items():
        if name == "operations":
            yield from ((key, (said["choice"], digest(said))) for key, said in value.items())
        elif name == "device":
            yield name, (value["arch"], digest({key: value[key] for key in value if key != "card"}))
        else:
            yield name, (str(value), digest(value))


def digest(value: Any) -> str:
    """Short, as that of each part goes to every rank."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def differences(ranks: Sequence[Mapping[str, tuple[str, str]]]) -> Iterator[str]:
    """A sentence for each part in which ranks differ, with what each of them has."""
    for name in dict.fromkeys(name for said in ranks for name in said):
        groups: dict[tuple[str, str], list[int]] = {}
        for rank, said in enumerate(ranks):
            groups.setdefault(said.get(name, ("nothing", "")), []).append(rank)
        if len(groups) > 1:
            choices = {choice for choice, _ in groups}
            why = "" if len(choices) == len(groups) else ", for different reasons"
            words = (f"{choice} on {listed(those)}" for (choice, _), those in groups.items())
            yield f"{name}: {', '.join(words)}{why}"


def listed(ranks: Sequence[int]) -> str:
    """The first few, and how many more."""
    shown = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:4]))}"
    return f"{shown} and {len(ranks) - 4} more" if len(ranks) > 4 else shown
