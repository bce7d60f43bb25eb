"""The one table of environment variables that a launch sets, each with its reason (ENV)."""

from __future__ import annotations

import difflib
import os
import platform as machine
import re
import socket
import struct
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from src.code_identity import CHECKOUT, package_version
from src.config import Config
from src.errors import Problem, UserError

INHERITED = [
    "MASTER_ADDR",
    "MASTER_PORT",
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "NPROC_PER_NODE",
]
"""Taken out before ranks start: an outer launcher's numbers are not this launch's (AGENT-1)."""
KNOWN = ["MANYHEAD_SPLIT_SEED", "MANYHEAD_COMMIT", "MANYHEAD_ATTEMPT"]
"""Variables of ours; another name that begins so is a typo (ENV-5)."""
SIOCGIFADDR = 0x8915
"""Linux's request for the address of a device."""
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL")


@dataclass(frozen=True)
class Setting:
    """What the rules of the table read."""

    config: Config
    platform: str
    """`cpu`, `cuda` or `rocm`."""
    ranks: int
    """Ranks of this launch on this machine."""
    jobs: int = 1
    """Jobs of this launch side by side on this machine."""
    cores: int = 1
    cache: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    """Root of the compiler caches."""
    meeting: str | None = None
    """First host of a launch over several nodes; None where all ranks share one machine."""

    @property
    def threads(self) -> int:
        """Threads of one rank."""
        return max(1, self.cores // (self.ranks * self.jobs))


@dataclass(frozen=True)
class Row:
    """One variable."""

    name: str
    rule: Callable[[Setting], str | None]
    """The value as text; None leaves it unset."""
    kind: str
    """`int`, `bool`, `text` or `path`."""
    platforms: tuple[str, ...]
    reason: str
    source: str = "platform"
    """`platform`, or `determinism`, which wins over it."""


def fixed(value: str) -> Callable[[Setting], str | None]:
    """A rule that does not depend on the setting."""
    return lambda setting: value


def when_bitwise(value: str) -> Callable[[Setting], str | None]:
    """A rule for `determinism=bitwise` alone."""
    return lambda setting: value if setting.config.determinism.name == "bitwise" else None


def below_cache(name: str) -> Callable[[Setting], str | None]:
    """A directory of its own below the cache root."""
    return lambda setting: str(setting.cache / name)


def connections(setting: Setting) -> str:
    """Hardware queues: more where communication of data or experts runs beside compute."""
    mesh = setting.config.mesh
    if mesh.ep > 1 and setting.config.pipeline.overlap:
        return "32"
    return "8" if mesh.dp * mesh.cp * mesh.ep > 1 else "1"


def wait_policy(setting: Setting) -> str | None:
    """PASSIVE where the threads of all jobs reach the cores; a lone rank keeps the default."""
    threads = setting.ranks * setting.jobs * setting.threads
    return "PASSIVE" if setting.ranks * setting.jobs > 1 and threads >= setting.cores else None


def network_device(setting: Setting) -> str | None:
    """Name of the device over which ranks meet: loopback on one machine, else that to the first host."""
    names = [name for _, name in socket.if_nameindex()]
    if setting.meeting is None:
        return next((name for name in ("lo", "lo0") if name in names), None)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((setting.meeting, 9))
            address = route.getsockname()[0]
            return next((name for name in names if device_address(route, name) == address), None)
    except OSError:
        return None


def device_address(any_socket: socket.socket, name: str) -> str | None:
    """IPv4 address of a network device; None without one."""
    import fcntl

    try:
        answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])


ALL, GPU = ("cpu", "cuda", "rocm"), ("cuda", "rocm")
TABLE = (
    Row(
        "OMP_NUM_THREADS",
        lambda s: str(s.threads),
        "int",
        ALL,
        "cores divided by ranks; torchrun would set 1",
    ),
    Row("OMP_WAIT_POLICY", wait_policy, "text", ("cpu",), "spinning threads slow each other 3 to 17 times"),
    Row("GLOO_SOCKET_IFNAME", network_device, "text", ALL, "the device of the route to the first rank"),
    Row("NCCL_SOCKET_IFNAME", network_device, "text", GPU, "as for gloo: a device name, never an address"),
    Row("CUDA_DEVICE_MAX_CONNECTIONS", connections, "int", GPU, "launch order of communication and compute"),
    Row("TORCH_NCCL_HIGH_PRIORITY", fixed("1"), "bool", GPU, "communication streams go first"),
    Row("TORCH_NCCL_ASYNC_ERROR_HANDLING", fixed("1"), "bool", GPU, "a dead peer ends the job"),
    Row(
        "PYTORCH_ALLOC_CONF", fixed("expandable_segments:True"), "text", ("cuda",), "fragmentation by routing"
    ),
    Row("HSA_NO_SCRATCH_RECLAIM", fixed("1"), "bool", ("rocm",), "crashes of MoE kernels"),
    Row("HSA_ENABLE_SDMA", fixed("1"), "bool", ("rocm",), "copy engines"),
    Row("GPU_MAX_HW_QUEUES", fixed("2"), "int", ("rocm",), "queues of communication and compute"),
    Row("HSA_KERNARG_POOL_SIZE", fixed("12582912"), "int", ("rocm",), "an MoE step has many kernels"),
    Row(
        "CUBLAS_WORKSPACE_CONFIG",
        when_bitwise(":4096:8"),
        "text",
        ("cuda",),
        "reproducible products",
        "determinism",
    ),
    Row("TORCHINDUCTOR_DETERMINISTIC", when_bitwise("1"), "bool", GPU, "no choice by timing", "determinism"),
    Row("TORCHINDUCTOR_MAX_AUTOTUNE", when_bitwise("0"), "bool", GPU, "no choice by timing", "determinism"),
    Row("NCCL_ALGO", when_bitwise("Ring"), "text", GPU, "one order of summation", "determinism"),
    Row("ROCBLAS_DEFAULT_ATOMICS_MODE", when_bitwise("0"), "bool", ("rocm",), "no atomics", "determinism"),
    Row("PYTHONHASHSEED", when_bitwise("0"), "int", ALL, "one order of sets", "determinism"),
    Row("TRITON_CACHE_DIR", below_cache("triton"), "path", GPU, "compiled kernels, by version"),
    Row("TORCHINDUCTOR_CACHE_DIR", below_cache("inductor"), "path", ALL, "compiled graphs, by version"),
    Row("TORCH_EXTENSIONS_DIR", below_cache("extensions"), "path", ALL, "built extensions, by version"),
    Row("PYTHONPATH", lambda s: str(CHECKOUT), "path", ALL, "ranks run this checkout, whatever is installed"),
    Row("PYTHONUNBUFFERED", fixed("1"), "bool", ALL, "a killed rank's last lines are in its log"),
)


@dataclass(frozen=True)
class Environment:
    """The variables of a rank with the origin of each."""

    values: dict[str, str]
    origins: dict[str, str]

    def json(self) -> dict[str, Any]:
        """What `env.json` holds; the values of secrets are masked."""
        return {
            name: {"value": "***" if SECRET.search(name) else value, "origin": self.origins[name]}
            for name, value in sorted(self.values.items())
        }


def rank_environment(setting: Setting, shell: Mapping[str, str]) -> Environment:
    """The table's variables for `setting`: the shell wins over `env.NAME`, determinism and platform (ENV-1).

    Raises:
        UserError: the shell or `env.NAME` contradicts determinism=bitwise (2).
    """
    values: dict[str, str] = {}
    origins: dict[str, str] = {}
    rows = [row for row in TABLE if setting.platform in row.platforms]
    layers: list[tuple[str, Mapping[str, str | None]]] = [
        ("platform", {row.name: row.rule(setting) for row in rows if row.source == "platform"}),
        ("determinism", {row.name: row.rule(setting) for row in rows if row.source == "determinism"}),
        ("env", setting.config.env),
        (
            "shell",
            {row.name: shell.get(row.name) for row in rows} | {n: shell.get(n) for n in setting.config.env},
        ),
    ]
    for origin, layer in layers:
        for name, value in layer.items():
            if value is not None:
                refuse_contradiction(setting, name, values.get(name), value, origin, origins.get(name))
                values[name], origins[name] = join_path(name, value), origin
    return Environment(values, origins)


def join_path(name: str, value: str) -> str:
    """The checkout stays first on the user's own PYTHONPATH."""
    if name != "PYTHONPATH" or value.split(os.pathsep)[0] == str(CHECKOUT):
        return value
    return os.pathsep.join([str(CHECKOUT), value])


def refuse_contradiction(
    setting: Setting, name: str, old: str | None, new: str, origin: str, old_origin: str | None
) -> None:
    """Under determinism=bitwise nothing may undo a determinism row."""
    if old_origin == "determinism" and old != new:
        message = f"{name}={new} ({origin}) contradicts determinism=bitwise, which needs {old}"
        raise UserError([Problem(name, message, f"unset {name}, or type determinism=none", "ENV-1")])


def unknown_names(shell: Mapping[str, str]) -> list[str]:
    """A warning for each MANYHEAD_* variable that means nothing, with the nearest one that does (ENV-5)."""
    warnings = []
    for name in sorted(shell):
        if name.startswith("MANYHEAD_") and name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, 1, 0)
            warnings.append(f"warning: the environment variable {name} is unknown; did you mean {near[0]}?")
    return warnings


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_root(config: Config) -> tuple[Path, str | None]:
    """Directory of the compiler caches, by versions, and a warning where it is not the usual one (CACHE).

    Raises:
        UserError: `paths.cache` is set and not writable (3).
    """
    stamp = f"{machine.machine()}-{package_version('torch')}-{package_version('triton')}"
    if config.paths.cache is not None:
        if not is_writable(Path(config.paths.cache)):
            raise UserError(
                f"paths.cache={config.paths.cache} is not writable; type another directory", code=3
            )
        return Path(config.paths.cache) / stamp, None
    local = Path(f"/var/tmp/manyhead-{os.getuid()}")
    if is_writable(local):
        return local / stamp, None
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "manyhead"
    return home / stamp, f"warning: {local} is not writable; compiler caches go to {home}"


def is_writable(directory: Path) -> bool:
    """Whether a file can be made, renamed and removed there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".probe-{os.getpid()}"
        probe.write_text("")
        probe.rename(directory / f".probed-{os.getpid()}")
        (directory / f".probed-{os.getpid()}").unlink()
    except OSError:
        return False
    return True
