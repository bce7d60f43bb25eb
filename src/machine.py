"""What this machine has, found without importing torch or starting a child (CFG-17, CFG-18)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from src.config import Config


@dataclass(frozen=True)
class Machine:
    """The devices that ranks may take, and the memory behind them."""

    platform: str
    """`cpu` or `cuda`."""
    devices: int
    """GPUs that are visible; 1 on a CPU, which takes as many ranks as a mesh asks for."""
    memory: int | None
    """Bytes that all ranks share on a CPU; of one GPU otherwise, None while nobody asked the driver."""
    source: str
    """Where `memory` comes from."""


def find_machine(config: Config, root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Machine:
    """The machine as `config.platform` sees it; `root` stands for `/`, so that tests bring their own.

    GPUs are counted by their device files and `CUDA_VISIBLE_DEVICES`: asking the driver costs a child or torch.
    """
    gpus = 0 if config.platform.name == "cpu" else _gpus(root, environ)
    if gpus or config.platform.name == "cuda":
        return Machine("cuda", gpus, None, "unprobed: the driver was not asked")
    memory, source = _memory(root)
    return Machine("cpu", 1, memory, source)


def _gpus(root: Path, environ: Mapping[str, str]) -> int:
    present = sum(file.name.removeprefix("nvidia").isdigit() for file in (root / "dev").glob("nvidia*"))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def _memory(root: Path) -> tuple[int | None, str]:
    """Bytes this process and its children may still take: what is available, within the control group's limit."""
    found = {}
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            found["available memory"] = int(rest.split()[0]) * 1024
    limit = "".join(_lines(root / "sys/fs/cgroup/memory.max")).strip()
    if limit.isdigit():
        used = "".join(_lines(root / "sys/fs/cgroup/memory.current")).strip()
        found["the control group's limit"] = int(limit) - (int(used) if used.isdigit() else 0)
    if not found:
        return None, "unprobed: this system does not say"
    source = min(found, key=lambda name: found[name])
    return found[source], source


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
