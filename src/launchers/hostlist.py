"""Slurm's compressed lists of host names: `n[01-03,7]-ib` is n01-ib, n02-ib, n03-ib, n7-ib (HOST)."""

from __future__ import annotations

from itertools import product


def expand(text: str) -> list[str]:
    """Host names of a list in its order; in a name with several brackets the left index is the slowest.

    Raises:
        ValueError: with the position, counted from 0, of what is wrong.
    """
    return [name for start, item in _items(text) for name in _names(text, start, item)]


def first(text: str) -> str:
    """The first host of a list: where the ranks meet."""
    return expand(text)[0]


def _items(text: str) -> list[tuple[int, str]]:
    """Position and text of each item between the commas outside of brackets."""
    items, start, depth = [], 0, 0
    for place, letter in enumerate([*text, ","]):
        depth += (letter == "[") - (letter == "]")
        if not 0 <= depth <= 1:
            raise _wrong(text, place, "an unexpected bracket")
        if letter == "," and depth == 0:
            items.append((start, text[start:place]))
            start = place + 1
    if depth or not text.strip():
        raise _wrong(text, len(text), "a bracket is not closed" if depth else "the list is empty")
    return items


def _names(text: str, start: int, item: str) -> list[str]:
    stripped = item.strip()
    if not stripped:
        raise _wrong(text, start, "a name is missing")
    if any(letter.isspace() for letter in stripped):
        raise _wrong(text, start, "a blank inside of a name")
    parts: list[list[str]] = []
    start += item.index(stripped)
    end = start + len(stripped)
    while start < end:
        opening = text.find("[", start, end)
        if opening < 0:
            opening = end
        parts.append([text[start:opening]])
        start = opening
        if opening < end:
            closing = text.index("]", opening)
            parts.append(_indices(text, opening + 1, closing))
            start = closing + 1
    return ["".join(names) for names in product(*parts)]


def _indices(text: str, start: int, end: int) -> list[str]:
    """`01-03,7` between two positions as 01, 02, 03, 7."""
    found: list[str] = []
    for part in text[start:end].split(","):
        low, dash, high = part.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise _wrong(text, start, f"{part!r} is no index and no range")
        if dash and int(high) < int(low):
            raise _wrong(text, start, f"{part!r} runs backwards")
        found += [str(k).zfill(len(low)) for k in range(int(low), int(high or low) + 1)]
        start += len(part) + 1
    return found


def _wrong(text: str, place: int, reason: str) -> ValueError:
    return ValueError(f"host list {text!r}: {reason} at position {place}")
