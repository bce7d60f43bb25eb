"""What this machine has, found without importing torch or starting a child (CFG-17, CFG-18)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from src.config import SCHEDULERS, Config

HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables by which a user hides GPUs; what is hidden stays so (ENV-2)."""


@dataclass(frozen=True)
class Machine:
    """The devices that ranks may take, and the memory behind them."""

    platform: str
    """`cpu`, `cuda` or `rocm`."""
    devices: int
    """GPUs that are visible; 1 on a CPU, which takes as many ranks as a mesh asks for."""
    memory: int | None
    """Bytes that all ranks share on a CPU; of one GPU otherwise. None where nobody was asked."""
    source: str
    """Where `memory` comes from."""


def find_machine(config: Config, root: Path = Path("/"), shell: Mapping[str, str] = os.environ) -> Machine:
    """The machine as `config.platform` sees it; `root` stands for `/`, so that tests bring their own.

    Of a job that is submitted it is all its nodes together, as far as the config describes them.
    """
    if config.launcher.name in SCHEDULERS:
        return _of_a_job(config)
    wanted = config.platform.name
    gpus = 0 if wanted == "cpu" else _gpus(root, shell)
    if wanted == "cpu" or (wanted == "auto" and gpus == 0):
        return Machine("cpu", 1, *_memory(root))
    return Machine("cuda" if wanted == "auto" else wanted, gpus, None, "unprobed: the driver was not asked")


def _of_a_job(config: Config) -> Machine:
    """Nobody asks the nodes: without `launcher.gpus_per_node` they are CPUs, unless `platform` says GPU."""
    wanted, gpus = config.platform.name, config.launcher.gpus_per_node
    source = "unprobed: the job's nodes were not asked"
    if wanted == "cpu" or (wanted == "auto" and gpus is None):
        return Machine("cpu", 1, None, source)
    nodes = config.launcher.nodes or (
        1 if config.mesh.spec == "auto" else -(-config.mesh.world // (gpus or 1))
    )
    return Machine("cuda" if wanted == "auto" else wanted, (gpus or 0) * nodes, None, source)


def _gpus(root: Path, shell: Mapping[str, str]) -> int:
    """GPUs by their device files, within what the user shows: the driver would cost a child or torch."""
    present = sum(file.name.removeprefix("nvidia").isdigit() for file in (root / "dev").glob("nvidia*"))
    shown = next((shell[name] for name in HIDING if name in shell), None)
    if shown is None:
        return present
    return min(present, len([name for name in shown.split(",") if name.strip() not in ("", "-1")]))


def _memory(root: Path) -> tuple[int | None, str]:
    """Bytes this process and its children may still take: what is available, within the control group."""
    found = {}
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            found["available memory"] = int(rest.split()[0]) * 1024
    limit = "".join(_lines(root / "sys/fs/cgroup/memory.max")).strip()
    if limit.isdigit():
        used = "".join(_lines(root / "sys/fs/cgroup/memory.current")).strip()
        found["limit of the control group"] = int(limit) - (int(used) if used.isdigit() else 0)
    if not found:
        return None, "unprobed: this system does not say"
    source = min(found, key=lambda name: found[name])
    return found[source], source


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
