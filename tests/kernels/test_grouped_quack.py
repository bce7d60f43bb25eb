"""OP-1 by QuACK: what a CPU can tell; its products are in test_gpu.py."""

from __future__ import annotations

import pytest
import torch

from src.kernels.grouped_quack import tile_columns
from src.kernels.local_experts import quack_local_experts
from src.kernels.sort_by_expert import sort_by_expert


@pytest.mark.parametrize(
    ("columns", "tile"),
    [(768, 192), (1536, 192), (2816, 192), (1408, 160), (2048, 192), (160, 160), (64, 160)],
)
def test_op_1_the_tile_that_wastes_least(columns: int, tile: int) -> None:
    """1,408 columns are 8 tiles of 192 with 9 % of waste, or 9 of 160 with 2 %."""
    assert tile_columns(columns) == tile


def test_op_6_no_tokens_keep_the_graph() -> None:
    """Rule (f): without tokens every expert's gradient is zero, not None, and nothing of QuACK is called."""
    order = sort_by_expert(torch.zeros(0, 2, dtype=torch.int32), 3)
    shapes = ((0, 8), (0, 2), (0, 8), (3, 8, 8), (3, 8, 4))
    tokens, weights, residual, gate_up, down = (torch.zeros(shape, requires_grad=True) for shape in shapes)
    out = quack_local_experts(tokens, weights, residual, order, gate_up, down)
    assert out.shape == (0, 8)
    out.sum().backward()
    for parameter in (gate_up, down):
        assert parameter.grad is not None
        assert not parameter.grad.any()
