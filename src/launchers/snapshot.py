"""A copy of the code as it is at submission: jobs run it, whatever is edited while they wait (PLAN-4)."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from src.code_identity import CHECKOUT, CodeRecord, git

FOLDERS = ("src", "hydra_plugins", "conf", "scripts")
"""What is copied where git does not say which files are tracked."""


def place(store: Path, code: CodeRecord) -> Path:
    """Where the copy of this code lies; all jobs of the same code share it."""
    return store / ".code" / code.code_identity[:16]


def snapshot(store: Path, code: CodeRecord, root: Path = CHECKOUT) -> Path:
    """Copy tracked files as they are now, and every source that counts; nothing if the copy is there.

    Args:
        store: `paths.runs`, which all nodes see.
        code: what `code_record(root)` says.
        root: the checkout.
    """
    target = place(store, code)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".staging-", dir=target.parent) as name:
        staging = Path(name) / "code"
        for file in tracked(root, code):
            copy = staging / file
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / file, copy)
        try:
            os.rename(staging, target)
        except OSError:
            if not target.is_dir():
                raise
    return target


def tracked(root: Path, code: CodeRecord) -> list[str]:
    """Paths below `root`: what git tracks, else the folders of the project; and all that `code` hashes."""
    listed = git(root, "ls-files", "-z")
    if listed is not None:
        names = {name for name in listed.split("\0") if name}
    else:
        files = (path for folder in FOLDERS for path in (root / folder).rglob("*"))
        names = {str(path.relative_to(root)) for path in files if "__pycache__" not in path.parts}
    return sorted(name for name in names | set(code.files) if (root / name).is_file())
