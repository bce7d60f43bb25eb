"""Options of a command line as clap reads them: what is not known is an error."""

from __future__ import annotations

import sys


def reject(message: str) -> int:
    """Say it on stderr; the code is 1."""
    print(message, file=sys.stderr)
    return 1


def letters_of(table: str) -> dict[str, str]:
    """The letters of a table such as `nodes/N= exclusive`."""
    words = [word.rstrip("=").partition("/") for word in table.split()]
    return {letter: name for name, _, letter in words if letter}


def parse(
    words: list[str], flags: dict[str, bool], letters: dict[str, str], trailing: bool = False
) -> tuple[dict[str, str], list[str]]:
    """Values by long name, and the rest; `trailing` ends options at the first other word."""
    found: dict[str, str] = {}
    rest = list(words)
    others = []
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            others.append(word)
            if trailing:
                return found, [*others, *rest]
            continue
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        else:
            name, value = letters.get(word[1], word[1]), word[2:].removeprefix("=")
            equals = value
        if name not in flags:
            raise SystemExit(reject(f"error: unexpected argument '{word}' found"))
        if flags[name] and not equals:
            value = rest.pop(0)
        if equals and not flags[name]:
            raise SystemExit(reject(f"error: unexpected value for '--{name}'"))
        found[name] = value
    return found, others
