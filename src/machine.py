"""What this machine has, found without importing torch or starting a child (CFG-17, CFG-18)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from src.code_identity import toolkit
from src.config import SCHEDULERS, Config
from src.trainer.checkpoint.directory import parse_size

HIDING = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
}
"""Platform → variables by which a user hides GPUs, the innermost first; what is hidden stays so (ENV-2)."""


WAIT_SECONDS = 10
"""How long the driver may take to answer; a hung one leaves the memory unknown."""


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
    kinds = [kind for kind in _PRESENT if kind == wanted or (wanted == "auto" and _is_usable(kind))]
    found = {kind: len(visible(kind, root, shell)[1]) for kind in kinds}
    platform = next((kind for kind in kinds if found[kind] or kind == wanted), "cpu")
    if platform == "cpu":
        return Machine("cpu", 1, *_memory(root))
    return Machine(platform, found[platform], *_told(config, "the driver was not asked"))


def pinned(config: Config) -> Config:
    """The config with the platform that ranks elsewhere must take, whatever devices they find."""
    return replace(config, platform=replace(config.platform, name=find_machine(config).platform))


def _of_a_job(config: Config) -> Machine:
    """Nobody asks the nodes: without `launcher.gpus_per_node` they are CPUs, unless `platform` says GPU."""
    wanted, gpus = config.platform.name, config.launcher.gpus_per_node
    nobody = "the job's nodes were not asked"
    if wanted == "cpu" or (wanted == "auto" and gpus is None):
        return Machine("cpu", 1, None, f"unprobed: {nobody}")
    nodes = config.launcher.nodes or (
        1 if config.mesh.spec == "auto" else -(-config.mesh.world // (gpus or 1))
    )
    return Machine("cuda" if wanted == "auto" else wanted, (gpus or 0) * nodes, *_told(config, nobody))


def _told(config: Config, nobody: str) -> tuple[int | None, str]:
    """Bytes of a GPU as the config says, or why they are not known."""
    told = config.launcher.gpu_memory
    if told is None:
        return None, f"unprobed: {nobody}"
    return parse_size(told), "launcher.gpu_memory"


def ask_driver(machine: Machine) -> Machine:
    """The machine with the memory of its smallest GPU, if nobody told it; a child asks, so launches only."""
    if machine.platform != "cuda" or machine.memory is not None:
        return machine
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return machine
    sizes = [int(line) for line in done.stdout.split() if line.isdigit()]
    return replace(machine, memory=min(sizes) * 2**20, source="nvidia-smi") if sizes else machine


def _is_usable(platform: str) -> bool:
    """Whether `auto` may take it: many a laptop's processor counts as an AMD GPU, but not for its torch."""
    return platform != "rocm" or toolkit().startswith("rocm")


def visible(
    platform: str, root: Path = Path("/"), shell: Mapping[str, str] = os.environ
) -> tuple[str, list[str]]:
    """The variable that says which GPUs are shown, and the names of those it shows.

    By their device files: the driver would cost a child or torch.
    """
    names = HIDING[platform]
    variable = next((name for name in names if name in shell), names[0])
    present = _PRESENT[platform](root)
    if variable not in shell:
        return variable, [str(number) for number in range(present)]
    shown = [name.strip() for name in shell[variable].split(",")]
    return variable, [name for name in shown if name not in ("", "-1")][:present]


def _nvidia(root: Path) -> int:
    return sum(file.name.removeprefix("nvidia").isdigit() for file in (root / "dev").glob("nvidia*"))


def _amd(root: Path) -> int:
    """Nodes of the driver's topology whose render device is here, for a container may show a few of them."""
    found = 0
    for file in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        properties = dict(line.split(maxsplit=1) for line in _lines(file) if " " in line)
        minor = properties.get("drm_render_minor", "-1").strip()
        found += (root / f"dev/dri/renderD{minor}").exists()
    return found


_PRESENT: dict[str, Callable[[Path], int]] = {"cuda": _nvidia, "rocm": _amd}
"""Platform → how many GPUs of it there are."""


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
