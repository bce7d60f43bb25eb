"""Sizes of the blocks that Triton's kernels work on."""

from __future__ import annotations


def power_of_two(size: int) -> int:
    """The smallest one that holds `size` elements, which the length of a block must be."""
    return 1 << max(0, size - 1).bit_length()
