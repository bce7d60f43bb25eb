"""What a key takes, whichever way its value came: types, closed sets, durations, secrets (CFG-3 to CFG-6)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from src import durations
from src.errors import Problem
from src.fields import Leaf

TYPE_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


@dataclass(frozen=True)
class Scalar:
    """An item of a list or mapping together with its text as typed."""

    value: Any
    text: str | None


@dataclass(frozen=True)
class Given:
    """A value as it reached a key."""

    key: str
    value: Any
    text: str | None
    """The value as typed; None where it is not known, or was quoted."""
    origin: str
    """`the command line`, or file and line."""
    plus: str = ""
    """`+` or `++` if the override adds its key."""

    def quoted(self) -> str:
        """The form that keeps the text as typed."""
        text = str(self.value) if self.text is None else self.text
        if self.key.rpartition(".")[2].isdigit():
            return f'"{text}" with its quotes, as an item of the list'
        if self.origin == COMMAND_LINE:
            return f"""'{self.plus}{self.key}="{text}"'"""
        return f'{self.key.rpartition(".")[2]}: "{text}"'


COMMAND_LINE = "the command line"


def check(given: Given, leaf: Leaf) -> list[Problem]:
    """Everything wrong with the value of a key; interpolations are judged once resolved."""
    value = given.value
    if value is None:
        return [] if leaf.optional else [_wrong(given, f"null is not {TYPE_NAMES[leaf.kind]}", "CFG-3")]
    if leaf.container is list:
        return (
            _check_items(given, leaf, enumerate(value)) if isinstance(value, list) else [_not_a_list(given)]
        )
    if leaf.container is dict:
        items = value.items() if isinstance(value, dict) else None
        return (
            [_wrong(given, "takes a mapping", "CFG-3")] if items is None else _check_items(given, leaf, items)
        )
    return _check_scalar(given, leaf)


def _check_items(given: Given, leaf: Leaf, items: Any) -> list[Problem]:
    single = Leaf(leaf.kind, None, False, leaf.choices, leaf.duration)
    scalars = ((name, value if isinstance(value, Scalar) else Scalar(value, None)) for name, value in items)
    parts = (Given(f"{given.key}.{name}", item.value, item.text, given.origin) for name, item in scalars)
    return [problem for part in parts for problem in _check_scalar(part, single)]


def _not_a_list(given: Given) -> Problem:
    return _wrong(given, f"takes a list, not {given.value!r}", "CFG-3", f"type '{given.key}=[{given.value}]'")


def _check_scalar(given: Given, leaf: Leaf) -> list[Problem]:
    if isinstance(given.value, str) and "${" in given.value:
        return list(filter(None, [_check_interpolation(given)]))
    return list(filter(None, [_CHECKS[leaf.kind](given, leaf), _check_secret(given)]))


def _check_interpolation(given: Given) -> Problem | None:
    """`${oc.env:NAME,default}` is the only expression, and never reads a secret (CFG-13, CFG-16)."""
    match = _ENV.fullmatch(given.value)
    if match is None:
        fix = "the only expression is ${oc.env:NAME,default}"
        return _wrong(given, f"{given.value} is an expression", "CFG-13", fix)
    return (
        _wrong(given, f"{given.value} would read a secret", "CFG-16", _SECRET_FIX)
        if _is_secret(match[1])
        else None
    )


def _check_secret(given: Given) -> Problem | None:
    """A string that looks like a token, or a variable named like one (CFG-16); the value is not shown."""
    if not isinstance(given.value, str) or given.value == "":
        return None
    named = given.key.startswith("env.") and _is_secret(given.key.removeprefix("env."))
    if not named and _TOKEN.search(given.value) is None:
        return None
    return _wrong(given, "looks like a secret", "CFG-16", _SECRET_FIX)


def _is_secret(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None


def _check_bool(given: Given, leaf: Leaf) -> Problem | None:
    if isinstance(given.value, bool) and (given.text is None or given.text.lower() in ("true", "false")):
        return None
    return _wrong(given, f"takes true or false, not {_shown(given)}", "CFG-6")


def _check_int(given: Given, leaf: Leaf) -> Problem | None:
    value = given.value
    if isinstance(value, int) and not isinstance(value, bool):
        # YAML reads 010 as 8 and 1:30 as 90; nobody means that (HYD-4).
        if given.text is None or given.text.replace("_", "").lstrip("+-") == str(abs(value)):
            return None
        return _wrong(given, f"{given.text} would be read as {value}", "HYD-4", f"type {given.key}={value}")
    if isinstance(value, float) and value.is_integer():
        return _wrong(
            given, f"takes a whole number, not {_shown(given)}", "CFG-6", f"type {given.key}={int(value)}"
        )
    return _wrong(given, f"takes a whole number, not {_shown(given)}", "CFG-3")


def _check_float(given: Given, leaf: Leaf) -> Problem | None:
    value = given.value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _wrong(given, f"takes a number, not {_shown(given)}", "CFG-3")
    if given.text is not None and ":" in given.text:
        return _wrong(given, f"{given.text} would be read as {value}", "HYD-4", f"type {given.key}={value}")
    if not math.isfinite(value):
        return _wrong(given, f"takes a finite number, not {_shown(given)}", "CFG-3")
    return None


def _check_str(given: Given, leaf: Leaf) -> Problem | None:
    if not isinstance(given.value, str):
        return _check_altered(given, leaf)
    return _check_text(given, leaf, given.value)


def _check_altered(given: Given, leaf: Leaf) -> Problem | None:
    """A number or bool where text is wanted: kept if it still reads as typed, else refused (CFG-4)."""
    if isinstance(given.value, list | dict):
        return _wrong(given, f"takes text, not {_shown(given)}", "CFG-4", f"type {given.quoted()}")
    if given.text is not None and str(given.value) == given.text:
        return _check_text(given, leaf, given.text)
    if given.text is None and isinstance(given.value, int) and not isinstance(given.value, bool):
        return _check_text(given, leaf, str(given.value))
    message = f"takes text, but {given.text or given.value} would be read as {given.value!r}"
    return _wrong(given, message, "CFG-4", f"type {given.quoted()}")


def _check_text(given: Given, leaf: Leaf, text: str) -> Problem | None:
    if leaf.choices and text not in leaf.choices:
        return _wrong(given, f"{text!r} is none of {', '.join(leaf.choices)}", "CFG-6")
    if not leaf.duration:
        return None
    try:
        durations.seconds(text)
    except ValueError:
        hint = f'; in a file quote it: "{text}s" or a clock' if text.isdigit() else ""
        fix = f"write {durations.GRAMMAR}{hint}"
        return _wrong(given, f"{text!r} is no duration", "CFG-5", fix)
    return None


def _shown(given: Given) -> str:
    if given.text == "":
        return "nothing"
    return repr(given.value) if given.text is None else given.text


def _wrong(given: Given, message: str, rule: str, fix: str = "") -> Problem:
    where = "" if given.origin in (COMMAND_LINE, "") else f" ({given.origin})"
    return Problem(given.key, message + where, fix, rule)


_ENV = re.compile(r"\$\{oc\.env:\s*([A-Za-z_][A-Za-z0-9_]*)\s*,[^{}]*\}")
_SECRET_NAME = re.compile(r"(?i)token|secret|passw|credential|api_?key|access_?key|private_?key")
_TOKEN = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})\b"
)
_SECRET_FIX = "secrets are environment variables only: set it in the shell, and leave it out of the config"

_CHECKS = {bool: _check_bool, int: _check_int, float: _check_float, str: _check_str}
