"""Reading and writing the small files of a run: JSON replaced atomically, and JSON lines that only grow."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]
NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text` in one rename, so that a reader sees the old or the new one whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Replace `path` atomically by indented strict JSON."""
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def overwrite_json(path: Path, value: Any) -> None:
    """Write over the bytes of a file that is there, where a second file has no room."""
    with path.open("r+", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
        file.truncate()


def read_json(path: Path) -> Record | None:
    """The object in `path`; None where it is missing or unreadable, for that means unknown (RUN-6)."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def number(value: Any) -> float | None:
    """A metric as a float: `"nan"`, `"inf"`, `"-inf"` by name (LOG-1), None for what is no number."""
    if isinstance(value, str):
        return NONFINITE.get(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return None


class LineReader:
    """Reads the complete lines that were added to a file since the last call; a torn last line waits."""

    def __init__(self, path: Path, from_end: bool = False) -> None:
        self.path = path
        self.offset = path.stat().st_size if from_end and path.exists() else 0

    def new_lines(self) -> list[str]:
        """Lines completed since the last call, without their ends; none while the file does not exist."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        return whole.decode("utf-8", errors="replace").splitlines()


def parse(lines: list[str]) -> Iterator[Record]:
    """The JSON objects among the lines; a line that is none (cut by a kill) is passed over."""
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def last_of(path: Path, key: Callable[[Record], Any]) -> list[Record]:
    """The last record of each key, ordered by key, for a resumed run repeats steps (LOG-3)."""
    found = {key(record): record for record in parse(LineReader(path).new_lines())}
    return [found[k] for k in sorted(found)]


def read_steps(path: Path) -> list[Record]:
    """`metrics.jsonl` or `evaluation.jsonl`: one record per step, ascending; none without the file."""
    return last_of(path, lambda record: int(record["step"]))


def read_samples(path: Path) -> list[Record]:
    """`samples.jsonl`: one record per step, prompt and mode."""
    return last_of(path, lambda record: (int(record["step"]), str(record["prompt"]), str(record["mode"])))
