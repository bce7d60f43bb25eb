"""OP-1 by QuACK: what a CPU can tell; its products are in test_gpu.py."""

from __future__ import annotations

import pytest

from src.kernels.grouped_quack import tile_columns


@pytest.mark.parametrize(
    ("columns", "tile"),
    [(768, 192), (1536, 192), (2816, 192), (1408, 160), (2048, 192), (160, 160), (64, 160)],
)
def test_op_1_the_tile_that_wastes_least(columns: int, tile: int) -> None:
    """1,408 columns are 8 tiles of 192 with 9 % of waste, or 9 of 160 with 2 %."""
    assert tile_columns(columns) == tile
