"""The switch of `determinism=bitwise` in a rank (DET-6)."""

from __future__ import annotations

import os

import torch

from src.config import Config

WORKSPACE = ":4096:8"
"""What cuBLAS needs for products that are the same each time; read at its first call."""


def settle(config: Config) -> None:
    """Set what bitwise equal runs need, before the first CUDA call; a launch has set the variables."""
    if config.determinism.name != "bitwise":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = config.debug.poison  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def check(config: Config, device: torch.device) -> None:
    """Every rank asserts that the switch is on; no key turns TF32 on, so it is off."""
    if config.determinism.name != "bitwise":
        return
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    assert torch.get_float32_matmul_precision() == "highest"
    if device.type == "cuda":
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == WORKSPACE
