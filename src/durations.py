"""Durations as text (CFG-5): the one parser that every launcher and time-out uses."""

from __future__ import annotations

import re

GRAMMAR = '"90m", "1d12h", "HH:MM:SS" or "D-HH:MM:SS"'

_UNITS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d{1,2}):([0-5]\d):([0-5]\d)")


def seconds(text: str) -> int:
    """Seconds of a duration such as `90m`, `1d12h`, `02:30:00` or `1-12:00:00`.

    Raises `ValueError` for anything else, bare digits included: YAML reads `4:00:00` as 14400, so a number
    may be a clock that lost its colons.
    """
    match = (_UNITS.fullmatch(text) if text else None) or _CLOCK.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no duration; write {GRAMMAR}")
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest
