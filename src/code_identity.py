"""Which code made a run: a hash of sources and core packages, the commit and its changes (RUN-7, RUN-8)."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
SOURCES = ("src/**/*.py", "hydra_plugins/**/*.py", "train.py")
CORE = ("torch", "triton", "numpy", "hydra-core", "omegaconf", "datasets", "tokenizers", "safetensors")
"""Packages whose version can change a number; trackers and figures cannot and are left out."""


@dataclass(frozen=True)
class CodeRecord:
    """What `code.json` holds."""

    code_identity: str
    """sha256 over the files and package versions below."""
    files: dict[str, str]
    """sha256 of each source by its path in the checkout."""
    packages: dict[str, str | None]
    """Versions of the core packages; None where one is not installed."""
    python: str
    commit: str | None
    """Git's commit, else `MANYHEAD_COMMIT`, else None."""
    dirty: bool | None
    """Whether tracked files differ from the commit; None without git."""

    def json(self) -> dict[str, Any]:
        return asdict(self)


def package_version(name: str) -> str | None:
    """Installed version of a distribution without importing it; None where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def toolkit() -> str:
    """What the installed torch was built for: `cuda13.0`, `rocm6.4` or `cpu`; found without importing it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return "cpu"
    return toolkit_of(Path(found.origin).with_name("version.py").read_text(encoding="utf-8"))


def toolkit_of(text: str) -> str:
    """The same from the text of torch's `version.py`."""
    for name, shown in (("cuda", "cuda"), ("hip", "rocm")):
        built = re.search(rf"^{name}[^=\n]*=\s*'(\d+\.\d+)", text, re.MULTILINE)
        if built is not None:
            return f"{shown}{built[1]}"
    return "cpu"


def git(root: Path, *words: str) -> str | None:
    """Output of a git command in `root`; None where git, or the repository, is missing."""
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", errors="replace") if done.returncode == 0 else None


def source_hashes(root: Path) -> dict[str, str]:
    """sha256 of every file that decides what a run computes, by its path below `root`."""
    paths = sorted({path for pattern in SOURCES for path in root.glob(pattern) if path.is_file()})
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths
    }


def code_record(root: Path = CHECKOUT) -> CodeRecord:
    """Describe the code below `root` as it is now."""
    files = source_hashes(root)
    packages = {name: package_version(name) for name in CORE}
    text = "\n".join(f"{name} {value}" for name, value in [*files.items(), *packages.items()])
    commit = git(root, "rev-parse", "HEAD")
    status = git(root, "status", "--porcelain", "--untracked-files=no") if commit else None
    return CodeRecord(
        code_identity=hashlib.sha256(text.encode()).hexdigest(),
        files=files,
        packages=packages,
        python=platform.python_version(),
        commit=commit.strip() if commit else os.environ.get("MANYHEAD_COMMIT"),
        dirty=bool(status) if status is not None else None,
    )


def code_diff(root: Path = CHECKOUT) -> str:
    """Uncommitted changes of tracked files as a patch; empty without git."""
    return git(root, "diff", "HEAD") or ""


def code_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Names of the files and packages that differ between two `code.json` records, sorted."""
    changed = []
    for part in ("files", "packages"):
        before, after = old.get(part, {}), new.get(part, {})
        changed += [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    return changed
