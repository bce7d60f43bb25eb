"""What ranks tell each other around a save or a load: an error of one rank is an error of all.

Checkpoints are written and read with plain collectives in between; a rank that raised alone would leave the
others waiting for their time-out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from src.trainer.runtime import Runtime

T = TypeVar("T")


def agree(runtime: Runtime, function: Callable[[], T]) -> T:
    """Call `function` on rank 0 alone; every rank returns its result, or raises its exception."""
    return cast(T, everyone(runtime, function if runtime.rank == 0 else _nothing)[0])


def everyone(runtime: Runtime, function: Callable[[], T]) -> list[T]:
    """Call `function` on every rank; all ranks return all results by rank, or raise the first exception."""
    outcomes = runtime.gather_objects(_attempt(function))
    for _, error in outcomes:
        if error is not None:
            raise error
    return [cast(T, result) for result, _ in outcomes]


def _attempt(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, error


def _nothing() -> None:
    return None
