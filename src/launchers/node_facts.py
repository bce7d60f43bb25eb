"""The single checks of a node: each returns whether it is well and what was found.

They read the node and change nothing but a probe file that is gone at once (CHECK-1).
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from src.code_identity import CORE, package_version
from src.config import Config
from src.durations import seconds
from src.launchers.caches import cache_root, is_writable
from src.launchers.environment import cores
from src.trainer.checkpoint.directory import size_in_bytes

PORTS = 8
"""Ports that must be free at the same time."""
RANGE = range(12000, 32000)
"""Where the ranks of several nodes meet (LOCAL-1)."""
TORCH = ((2, 11), (2, 14))
"""First version of torch that works and first that is not tried."""
NEEDED = ("torch", "numpy", "hydra-core", "omegaconf")
"""Packages without which no rank starts."""
RUNTIMES = ("docker", "podman", "apptainer")
GIB = 2**30

Result = tuple[bool, str]
"""Whether it is well, and what was found."""


def disk(config: Config) -> Result:
    """Free space below runs, data and caches."""
    least = size_in_bytes(config.platform.thresholds.disk)
    cache = Path(config.paths.cache or "/var/tmp")
    places = (Path(config.paths.runs), Path(config.paths.data), cache)
    free = {str(path): shutil.disk_usage(existing(path)).free for path in places}
    words = ", ".join(f"{path} {size / GIB:.1f} GiB" for path, size in free.items())
    return min(free.values()) >= least, f"{words} free; {config.platform.thresholds.disk} wanted"


def existing(path: Path) -> Path:
    """The path, or the nearest directory above it that is there."""
    return next(place for place in (path, *path.parents) if place.exists())


def writable(config: Config) -> Result:
    """Whether runs, the store of data and caches can be written."""
    places = (Path(config.paths.runs), Path(config.paths.data), cache_root(config)[0].parent)
    wrong = [str(path) for path in places if not can_write(path)]
    return not wrong, f"not writable: {', '.join(wrong)}" if wrong else "runs, data and caches"


def can_write(path: Path) -> bool:
    """As `is_writable`, without leaving a directory that was not there."""
    return is_writable(path) if path.is_dir() else os.access(existing(path), os.W_OK)


def shm(config: Config) -> Result:
    """Size of `/dev/shm`."""
    wanted = config.platform.thresholds.shm
    total = shutil.disk_usage("/dev/shm").total
    return total >= size_in_bytes(wanted), f"/dev/shm has {total / GIB:.1f} GiB; {wanted} wanted"


def memlock(config: Config) -> Result:
    """Memory that a process may lock."""
    wanted = config.platform.thresholds.memlock
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    is_free = limit == resource.RLIM_INFINITY
    shown = "unlimited" if is_free else f"{limit / GIB:.2f} GiB"
    is_well = is_free or (wanted != "unlimited" and limit >= size_in_bytes(wanted))
    return is_well, f"{shown}; {wanted} wanted"


def ports(config: Config) -> Result:
    """Ports of the loopback device, and ports where nodes meet, can be bound."""
    sockets: list[socket.socket] = []
    taken = 0
    try:
        sockets += [socket.create_server(("127.0.0.1", 0)) for _ in range(PORTS)]
        for port in RANGE[:: len(RANGE) // PORTS]:
            try:
                sockets.append(socket.create_server(("", port)))
            except OSError:
                taken += 1
    finally:
        for each in sockets:
            each.close()
    return (
        taken < PORTS // 2,
        f"{PORTS} on loopback; {taken} of {PORTS} tried in {RANGE[0]}-{RANGE[-1]} taken",
    )


def clock(config: Config) -> Result:
    """This clock beside that of the disk with the runs, which other nodes share."""
    with tempfile.NamedTemporaryFile(
        dir=existing(Path(config.paths.runs)), prefix=".manyhead-clock-"
    ) as file:
        before = time.time()
        file.write(b".")
        file.flush()
        skew = abs(os.stat(file.name).st_mtime - before)
    wanted = config.platform.thresholds.clock
    return skew <= seconds(wanted), f"{skew:.2f} s from the disk's; {wanted} allowed"


def names(config: Config) -> Result:
    """The host's own name resolves."""
    host = socket.gethostname()
    try:
        found = sorted({str(each[4][0]) for each in socket.getaddrinfo(host, None)})
    except OSError as error:
        return False, f"{host} does not resolve: {error}"
    return True, f"{host} is {', '.join(found)}"


def processors(config: Config) -> Result:
    """Cores of this process, and threads that it may start."""
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    threads = "any number of" if limit == resource.RLIM_INFINITY else str(limit)
    wanted = 64 * cores()
    is_well = limit == resource.RLIM_INFINITY or limit >= wanted
    return is_well, f"{cores()} cores, {threads} threads; {wanted} threads wanted"


def packages(config: Config) -> Result:
    """Versions of the packages that a rank imports; in a container they are the image's."""
    found = {name: package_version(name) for name in CORE}
    missing = [name for name in NEEDED if found[name] is None]
    torch = found["torch"]
    version = tuple(int(part) for part in torch.split(".")[:2]) if torch else ()
    is_known = not version or TORCH[0] <= version < TORCH[1]
    words = ", ".join(f"{name} {version or 'missing'}" for name, version in found.items())
    asked = "" if is_known else "; torch 2.11 to 2.13 wanted"
    return (not missing and is_known) or config.container.name != "none", f"Python {python()}, {words}{asked}"


def python() -> str:
    """Version of this Python."""
    return ".".join(map(str, sys.version_info[:3]))


def launchers(config: Config) -> Result:
    """What can start ranks here; only what the config asks for has to be there."""
    found = ["local"]
    version = answer("sbatch", "--version")
    if version is not None:
        found.append(version.strip())
    found += [name for name in RUNTIMES if shutil.which(name) is not None]
    if version is not None and "--container-image" in (answer("srun", "--help") or ""):
        found.append("pyxis")
    wanted = config.container.name
    is_well = wanted in ("none", *found)
    return is_well, ", ".join(found) + ("" if is_well else f"; container={wanted} wanted")


def answer(*command: str) -> str | None:
    """What a command prints; None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout + done.stderr if done.returncode == 0 else None


CHECKS: dict[str, Callable[[Config], Result]] = {
    "disk": disk,
    "writable": writable,
    "shm": shm,
    "memlock": memlock,
    "ports": ports,
    "clock": clock,
    "names": names,
    "processors": processors,
    "packages": packages,
    "launchers": launchers,
}
"""What is looked at on every node, in this order."""
