"""Triton kernels of OP-8: a counting sort by tiles of slots; what stands between them is a running sum."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sort_count_kernel(
    ids_ptr, counts_ptr, slots, tiles, E: tl.constexpr, TILE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Slots of each expert in one tile, into a column of counts [E, tiles]."""
    tile, e = tl.program_id(0), tl.arange(0, BLOCK_E)
    slot = tile * TILE + tl.arange(0, TILE)
    ids = tl.load(ids_ptr + slot, mask=slot < slots, other=-1)
    counts = tl.sum((ids[:, None] == e[None]).to(tl.int32), 0)
    tl.store(counts_ptr + e.to(tl.int64) * tiles + tile, counts, mask=e < E)


@triton.jit
def sort_place_kernel(
    ids_ptr, sums_ptr, row_slot_ptr, slot_row_ptr, offs_ptr, slots, tiles,
    E: tl.constexpr, TILE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Rows of a tile's slots: those that end before it, and those before it in the tile.

    `sums` are inclusive, over tiles within experts: what stands before its own count ends where that begins.
    """
    tile, e = tl.program_id(0), tl.arange(0, BLOCK_E)
    slot = tile * TILE + tl.arange(0, TILE)
    ids = tl.load(ids_ptr + slot, mask=slot < slots, other=-1)
    held = (ids[:, None] == e[None]).to(tl.int32)
    place = e.to(tl.int64) * tiles + tile
    before = tl.load(sums_ptr + place - 1, mask=(e < E) & (place > 0), other=0)
    row = tl.sum(held * (before[None] + tl.cumsum(held, 0) - 1), 1)
    tl.store(slot_row_ptr + slot, row, mask=slot < slots)
    tl.store(row_slot_ptr + row, slot, mask=slot < slots)
    if tile == tiles - 1:
        tl.store(offs_ptr + e, tl.load(sums_ptr + place, mask=e < E, other=0), mask=e < E)
