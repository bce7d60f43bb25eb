"""What a node's network looks like, from `/sys`, the kernel's routes and the NIC's own tool (ENV).

Everything that is asked of the machine stands here, so that rules are tested with a made-up one (ENV-6).
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import struct
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

SIOCGIFADDR = 0x8915
"""Linux's request for the address of a device."""
PATIENCE = 5.0
"""Seconds that the NIC's tool may take."""
PLUGINS = ("librccl-anp.so", "librccl-net.so")
"""Names of the AINIC plugin's library, newer one first."""
LIBRARIES = ("opt/rocm/lib", "usr/local/lib", "usr/lib/x86_64-linux-gnu", "usr/lib")


def device_to(host: str | None) -> str | None:
    """Name of the device over which packets to `host` leave; None where there is no route or no name.

    Without a host it is the loopback device, and no socket is opened, for a dry run opens none (CFG-17).
    """
    if host is None:
        names = {name for _, name in socket.if_nameindex()}
        return next((name for name in ("lo", "lo0") if name in names), None)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((host, 9))
            address = route.getsockname()[0]
            found = (name for _, name in socket.if_nameindex() if _address(route, name) == address)
            return next(found, None)
    except OSError:
        return None


def _address(any_socket: socket.socket, name: str) -> str | None:
    """IPv4 address of a network device; None without one."""
    try:
        answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])


def quality_of_service() -> str:
    """What the AINIC's tool says of its classes; empty without it."""
    tool = shutil.which("nicctl")
    if tool is None:
        return ""
    try:
        return subprocess.run([tool, "show", "qos"], capture_output=True, text=True, timeout=PATIENCE).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


@dataclass(frozen=True)
class Network:
    """A node's network; `root` stands for `/`."""

    root: Path = Path("/")
    shell: Mapping[str, str] = field(default_factory=lambda: os.environ)
    route: Callable[[str | None], str | None] = device_to
    qos: Callable[[], str] = quality_of_service

    def active_ports(self, layer: str) -> list[str]:
        """`device:port` of every port that is up, in order of their numbers.

        Args:
            layer: `InfiniBand` or `Ethernet`, as the kernel calls what runs over the port.
        """
        ports = (self.root / "sys/class/infiniband").glob("*/ports/*")
        found = [
            (port.parent.parent.name, port.name)
            for port in ports
            if "ACTIVE" in _text(port / "state") and _text(port / "link_layer") == layer
        ]
        return [f"{device}:{port}" for device, port in sorted(found, key=_by_number)]

    def plugin(self) -> str | None:
        """Path of AINIC's plugin for RCCL where it is a library of its own; None where it is not found."""
        named = [self.shell.get("ANP_HOME_DIR", "/workspace/amd-anp") + "/build"]
        named += self.shell.get("LD_LIBRARY_PATH", "").split(os.pathsep)
        folders = [self.root / folder.lstrip("/") for folder in (*named, *LIBRARIES) if folder]
        files = (folder / name for name in PLUGINS for folder in folders)
        found = next((file for file in files if file.is_file()), None)
        return None if found is None else f"/{found.relative_to(self.root)}"

    def lossless_class(self) -> int | None:
        """DSCP of the class that the NIC never drops; None where it does not say."""
        text = self.qos()
        priority = re.search(r"PFC no-drop priorities\s*:\s*(\d+)", text)
        if priority is None:
            return None
        line = rf"^(?!.*bitmap).*DSCP[^:\n]*:\s*(\d+)\s*==>\s*priority\s*:\s*{priority[1]}\s*$"
        found = re.search(line, text, re.MULTILINE)
        return None if found is None else int(found[1])


def _by_number(port: tuple[str, str]) -> tuple[str, int, int]:
    """`mlx5_2` before `mlx5_10`."""
    name = re.sub(r"\d+$", "", port[0])
    return name, int(port[0][len(name) :] or 0), int(port[1])


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
