"""`kernels.gemm_tuning` in a rank: applied before its first product, or left out with a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from src.config import Config
from src.kernels.gemm_tuning import apply
from src.kernels.registry import describe

IGNORED = (
    "kernels.gemm_tuning is left out under determinism=bitwise: a solution may add in another order "
    "each time; kernels.autotune=pinned takes it even so"
)


def tune_products(
    config: Config, device: torch.device, tunable: Any = None
) -> tuple[dict[str, Any], list[str]]:
    """What `kernels.json` says of tuned products, and lines for the console.

    Raises:
        UserError: the file is missing, of another stamp, or nothing for this device (3).
    """
    path = config.kernels.gemm_tuning
    if path == "none":
        return {}, []
    if config.determinism.name == "bitwise" and config.kernels.autotune != "pinned":
        return {"gemm_tuning": "left out"}, [IGNORED]
    return {"gemm_tuning": apply(Path(path), describe(device), tunable)}, []
