"""The machine, the versions and the code that a measurement was made with (BENCH-7)."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import torch

from src.code_identity import code_record, package_version

CLOCK, POWER, DRIVER = "clocks.sm", "power.limit", "driver_version"


def query(device: torch.device, field: str) -> str | None:
    """What `nvidia-smi` says of the card; None without one."""
    if device.type != "cuda":
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", f"--id={uuid}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def query_number(device: torch.device, field: str) -> float | None:
    """As `query`, for a number; None where the card gives none."""
    try:
        return float(query(device, field) or "")
    except ValueError:
        return None


def card(device: torch.device, clock_before: float | None) -> dict[str, Any]:
    """Name, memory, power limit and clock; `clock_before` was read when the measurement began."""
    clocks = {"before": clock_before, "after": query_number(device, CLOCK)}
    if device.type != "cuda":
        name = platform.processor() or platform.machine()
        return {"name": name, "memory_gib": 0, "power_limit_w": None, "sm_clock_mhz": clocks}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "power_limit_w": query_number(device, POWER),
        "sm_clock_mhz": clocks,
    }


def versions(device: torch.device) -> dict[str, Any]:
    """Of everything that a speed depends on; None where it is not there."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "triton": package_version("triton"),
        "driver": query(device, DRIVER),
        "transformers": package_version("transformers"),
        "flash_attn_4": package_version("flash-attn-4"),
    }


def origin() -> dict[str, Any]:
    """Date, commit and command."""
    code = code_record()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": code.commit,
        "dirty": code.dirty,
        "command": shlex.join(["python", *sys.argv]),
    }
