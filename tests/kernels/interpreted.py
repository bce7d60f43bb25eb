"""What can be asked of Triton's kernels without a GPU, in one process of its own: `python -m <this>`.

The interpreter is switched on when a kernel is made, so TRITON_INTERPRET=1 must stand before any import.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from src.kernels import quirks
from src.kernels.declaration import Implementation
from src.kernels.registry import describe, implementations
from src.kernels.toolchain import find_toolchain
from tests.kernels import parity

CPU = torch.device("cpu")
LIMIT = 250
"""Seconds for all."""


@dataclass
class Findings:
    """What went wrong, by what was tried, and which custom operations were checked."""

    tried: dict[str, str | None] = field(default_factory=dict)
    operations: list[str] = field(default_factory=list)

    def attempt(self, name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            self.tried[name] = None
        except Exception:
            self.tried[name] = traceback.format_exc()


def find() -> Findings:
    """Run the process, and what it found."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "TRITON_DEBUG": "1"}
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return Findings(**json.loads(done.stdout.splitlines()[-1]))


def limits() -> list[str]:
    """The names of the limits, read without Triton."""
    source = Path(__file__).with_name("limits.py").read_text(encoding="utf-8")
    table = source[source.index("LIMITS:") :]
    return re.findall(r"^    (\w+),$", table, re.MULTILINE)


def main() -> None:
    """Every limit, then every implementation in Triton on all examples that it takes."""
    from tests.kernels.limits import LIMITS

    findings = Findings()
    for limit in LIMITS:
        findings.attempt(limit.__name__, limit)
    with quirks.patched(find_toolchain("cpu"), ()):
        for implementation in ours():
            name = f"{implementation.operation}={implementation.name}"
            findings.attempt(name, partial(check, implementation, findings))
    print(json.dumps(asdict(findings)))


def ours() -> list[Implementation]:
    """Those in Triton."""
    return [i for known in implementations().values() for i in known.values() if i.source == "triton"]


def check(implementation: Implementation, findings: Findings) -> None:
    """Parity, and the custom operations."""
    chosen = parity.fitting(implementation, describe(CPU), CPU, torch.float32)
    assert chosen, "no example fits"
    for example in chosen:
        parity.check(implementation, example, torch.float32)
    recorder = parity.recorded(implementation, chosen)
    findings.operations += recorder.calls
    parity.opcheck(recorder)


if __name__ == "__main__":
    main()
