"""What a run does about other people's code while it lasts: quirks met, autotuners narrowed and pinned."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.config import Config
from src.kernels import quirks
from src.kernels.autotune.pins import FOLDER, pinned
from src.kernels.registry import Ops, implementations
from src.kernels.toolchain import find_toolchain


@dataclass
class Repairs:
    """The patches that stand; closing undoes them."""

    record: dict[str, Any]
    """What `kernels.json` says of them; equal on all ranks."""
    lines: list[str]
    """For the log: what each rule kept."""
    stack: ExitStack

    def close(self) -> None:
        """Undo every patch, the last one first."""
        self.stack.close()


def repair(config: Config, directory: Path, rank: int, ops: Ops) -> Repairs:
    """Meet every quirk that stands here, before the first launch.

    Raises:
        UserError: a patch against wrong results could not be made (3).
    """
    toolchain, stack = find_toolchain(ops.device.kind), ExitStack()
    standings = stack.enter_context(
        quirks.patched(toolchain, packages_used(ops), config.kernels.quirks_disabled)
    )
    tunes = toolchain.device != "cpu" or toolchain.interpreted
    if autotune_of(config) == "pinned" and tunes and toolchain.versions["triton"] is not None:
        stack.enter_context(pinned(directory / FOLDER, rank))
    lines = [
        outcome.line() for standing in standings for outcome in standing.rules if outcome.status == "narrowed"
    ]
    return Repairs(quirks.record(standings) | {"autotune": autotune_of(config)}, lines, stack)


def autotune_of(config: Config) -> str:
    """`kernels.autotune`; two runs that time their kernels are not equal bit for bit (DET-5)."""
    return "pinned" if config.determinism.name == "bitwise" else config.kernels.autotune


def packages_used(ops: Ops) -> set[str]:
    """Packages that are imported already or that a chosen implementation needs."""
    known = implementations()
    needed = {
        name.replace("-", "_")
        for operation, choice in ops.choices.items()
        for name in known[operation][choice.name].packages
    }
    return needed | {name.partition(".")[0] for name in sys.modules}
