"""What a node can do and what is wrong with it: independent checks, each with a time limit (CHECK).

No check imports torch, meets another node or waits longer than `platform.thresholds.probe`; a GPU is looked
at by a process of its own (`src/launchers/probe.py`), which is killed when it hangs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from src.code_identity import CHECKOUT, package_version
from src.config import Config, LauncherConfig
from src.durations import seconds
from src.errors import UserError
from src.launchers.container import is_wrapped
from src.launchers.node_facts import CHECKS, GIB, Result
from src.machine import find_machine
from src.records import write_json
from src.trainer.checkpoint.directory import size_in_bytes


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    state: str
    """`ok`, `failed`, or `timeout` where no answer came in time."""
    message: str
    """What was found, beside what is asked for."""


@dataclass(frozen=True)
class NodeReport:
    """Everything about one node, as JSON with the same keys everywhere."""

    node: str
    """Name in the scheduler, else of the host."""
    time: float
    platform: str
    checks: list[Check]
    schema: int = 1

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return all(check.state == "ok" for check in self.checks)

    def json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {"schema": self.schema, "node": self.node, "passed": self.passed, **asdict(self)}

    def text(self) -> str:
        """A line for each check, what is wrong first seen by its word."""
        lines = [f"{self.node}: {'passed' if self.passed else 'FAILED'} on {self.platform}"]
        return "\n".join(
            [*lines, *(f"  {check.state:<8} {check.name:<12} {check.message}" for check in self.checks)]
        )


def check_node(config: Config, probe: Callable[[int], list[str]] | None = None) -> NodeReport:
    """Look at this node: all checks side by side, so that it takes as long as the slowest.

    Args:
        config: resolved and valid; its paths and `platform.thresholds` are looked at.
        probe: command that looks at a GPU by its index; ours if not given.
    """
    platform = find_machine(config).platform
    parts = [Part(name, partial(look, config)) for name, look in CHECKS.items()]
    if platform != "cpu":
        parts += device_parts(config, gpus(config), probe)
    limit = seconds(config.platform.thresholds.probe) + 1
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return NodeReport(name, time.time(), platform, side_by_side(parts, limit))


@dataclass(frozen=True)
class Part:
    """A check that is still to be made."""

    name: str
    look: Callable[[], Result]


def device_parts(config: Config, devices: int, probe: Callable[[int], list[str]] | None) -> list[Part]:
    """A check for each GPU; one for all where none is there, or none can be tried from here."""
    if not devices:
        return [Part("gpu", lambda: (False, "no GPU is visible"))]
    if probe is None and is_wrapped(config) and package_version("torch") is None:
        return [Part("gpu", lambda: (True, f"{devices} GPUs, not tried: torch is in the image only"))]
    command = probe or probe_command
    return [Part(f"gpu {k}", partial(probe_device, command(k), config)) for k in range(devices)]


def gpus(config: Config) -> int:
    """GPUs that this node shows, whatever a job asks for."""
    return find_machine(replace(config, launcher=LauncherConfig())).devices


def side_by_side(parts: Sequence[Part], limit: float) -> list[Check]:
    """The checks in the order given; one that hangs is a `timeout` and holds no other up (CHECK-2)."""
    found: dict[str, Check] = {}

    def work(name: str, look: Callable[[], Result]) -> None:
        try:
            is_well, words = look()
        except TimeoutError as error:
            found[name] = Check(name, "timeout", str(error))
        except Exception as error:
            found[name] = Check(name, "failed", f"{type(error).__name__}: {error}")
        else:
            found[name] = Check(name, "ok" if is_well else "failed", words)

    threads = [threading.Thread(target=work, args=(part.name, part.look), daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    end = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    silent = f"no answer within {limit:.0f} s"
    return [found.get(part.name, Check(part.name, "timeout", silent)) for part in parts]


def probe_command(index: int) -> list[str]:
    """The process that looks at one GPU."""
    return [sys.executable, "-P", "-m", "src.launchers.probe", str(index)]


def probe_device(command: list[str], config: Config) -> Result:
    """What the process of one GPU found.

    Raises:
        TimeoutError: it did not end in time and was killed.
    """
    limit = config.platform.thresholds.probe
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=seconds(limit))
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)
            # A process that hangs in the driver stays until the driver lets it go: nobody waits longer.
            process.wait(timeout=0.5)
        raise TimeoutError(f"no answer within {limit}; killed") from None
    if process.returncode != 0:
        last = errors.decode(errors="replace").strip().splitlines() or [f"code {process.returncode}"]
        return False, last[-1]
    return judge(json.loads(output.decode().splitlines()[-1]), config)


def judge(seen: dict[str, Any], config: Config) -> Result:
    """What a GPU's probe printed, beside the thresholds."""
    wanted = config.platform.thresholds.device_memory
    words = f"{seen['name']}, {seen['total'] / GIB:.0f} GiB, {seen['taken'] / GIB:.1f} GiB taken"
    if not seen["finite"]:
        return False, f"{words}; a product of 2048 x 2048 is not finite"
    if seen["taken"] > size_in_bytes(wanted):
        return False, f"{words}, {wanted} allowed"
    return True, words


def wrong(reports: Iterable[NodeReport]) -> list[str]:
    """A line for everything that failed."""
    return [
        f"{report.node}: {check.name}: {check.state}: {check.message}"
        for report in reports
        for check in report.checks
        if check.state != "ok"
    ]


def check_before_ranks(config: Config, folder: Path, node: int, say: Callable[[str], None]) -> None:
    """What `launcher.checks` asks for: look at this node, note it in `folder`, say what is wrong.

    Raises:
        UserError: something is, and the checks are `strict` (3).
    """
    if config.launcher.checks == "none":
        return
    report = check_node(config)
    write_json(folder / f"checks.{node}.json", report.json())
    lines = wrong([report])
    for line in lines:
        say(f"check      {line}")
    if lines and config.launcher.checks == "strict":
        fix = "mend it, lower platform.thresholds, or type launcher.checks=info"
        raise UserError("\n".join([f"{report.node} fails launcher.checks=strict; {fix}", *lines]), code=3)
