"""Functions that a compiler must not look into: custom operations while a graph is traced (CMP-1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def opaque(
    name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """`function` itself, but a custom operation with the shapes of `fake` while a graph is traced.

    The dispatch of a custom operation costs some tens of microseconds, which eager calls need not pay.
    """
    operation = torch.library.custom_op(f"manyhead::{name}", function, mutates_args=(), schema=schema)
    operation.register_fake(fake)

    def call(*arguments: Any) -> Any:
        return operation(*arguments) if torch.compiler.is_compiling() else function(*arguments)

    return call
