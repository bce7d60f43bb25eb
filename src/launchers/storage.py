"""Whether the places that a launch reads and writes answer at all: a lost file system hangs for ever."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from src.config import Config
from src.errors import Problem, UserError

PATIENCE = 20.0
"""Seconds in which a directory has to answer."""


def check_storage(config: Config) -> None:
    """Raise UserError (3) naming each of `paths.runs` and `paths.data` that hangs; one may be missing yet."""
    places = {"paths.runs": Path(config.paths.runs)}
    if config.data.kind != "synthetic":
        places["paths.data"] = Path(config.paths.data)
    answered: set[str] = set()
    threads = [
        threading.Thread(target=look, args=(place, key, answered), daemon=True)
        for key, place in places.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    problems = [
        Problem(key, f"{place} has not answered for {PATIENCE:.0f} s", f"mount it, or type {key}=DIRECTORY")
        for key, place in places.items()
        if key not in answered
    ]
    if problems:
        raise UserError(problems, code=3)


def look(place: Path, key: str, answered: set[str]) -> None:
    """Ask for the directory, in a thread that may never come back."""
    os.path.exists(place)
    answered.add(key)
