"""Which positions of a sequence a context-parallel rank has, and who attends to whom (ENG-21); no torch here.

A sequence is cut into 2·cp blocks of equal length. Rank r has the blocks r and 2·cp - 1 - r, front and back:
so every rank has as many pairs of a query and a key before it as any other.
"""

from __future__ import annotations

from dataclasses import dataclass


def spans(length: int, cp: int, rank: int) -> tuple[range, range]:
    """Positions of the two blocks of a rank, in the order in which it holds them."""
    block, rest = divmod(length, 2 * cp)
    assert not rest, (length, cp)
    back = 2 * cp - 1 - rank
    return range(rank * block, (rank + 1) * block), range(back * block, (back + 1) * block)


@dataclass(frozen=True)
class Hop:
    """A step of the ring: which of a rank's queries look at which of the keys that are there."""

    source: int
    """The rank that the keys come from."""
    queries: slice
    """Of the rank's own positions."""
    keys: slice
    """Of the positions of `source`."""
    nearest: int
    """Least distance from one of these queries back to one of these keys; 0 where some keys come later."""


def hop(step: int, cp: int, rank: int, block: int) -> Hop:
    """Step `step` of the ring on a rank, with the keys of rank - step; 2·block² scores after the first.

    From a lower rank the front block is before all queries here, and the back block after them; from a
    higher one both blocks are before the queries of the back block, and after those of the front.
    """
    both, front, back = slice(0, 2 * block), slice(0, block), slice(block, 2 * block)
    source = (rank - step) % cp
    if source == rank:
        return Hop(source, both, both, nearest=0)
    nearest = (abs(rank - source) - 1) * block + 1
    return Hop(source, both, front, nearest) if source < rank else Hop(source, back, both, nearest)
