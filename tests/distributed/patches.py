"""How faults are put in: patches inside the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def wrapped(owner: Any, name: str, wrapper: Any) -> Iterator[None]:
    """`owner.name` replaced by `wrapper(original, *arguments)`."""
    original = getattr(owner, name)

    def call(*arguments: Any, **keywords: Any) -> Any:
        return wrapper(original, *arguments, **keywords)

    with mock.patch.object(owner, name, call):
        yield
