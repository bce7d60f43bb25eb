"""Initial weights: value = f(seed, canonical name, block of rows), so the mesh cannot matter (ENG-9).

A rank draws only the blocks that it holds, on the CPU in fp32, and casts: the same bits on every device, and
no full tensor in memory. Each expert has its own names, so no two are clones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from src.config import Config
from src.models.build import ParamSpec
from src.seeds import generator
from src.trainer.parallel.halves import View
from src.trainer.parallel.shards import LocalEntry

BLOCK = 1024
"""Rows that one generator draws."""
THREADS = min(16, os.cpu_count() or 1)
"""Tensors that are drawn side by side: 4.6 billion numbers took a minute and a half in one thread."""


@torch.no_grad()
def initialise(config: Config, entries: Mapping[str, LocalEntry], specs: Mapping[str, ParamSpec]) -> None:
    """Fill this rank's parameters by the rules of `specs`, which are keyed by module name."""
    drawn = []
    for name, entry in entries.items():
        spec = specs[entry.parameter]
        for offsets, view in entry.parts:
            if spec.init == "normal":
                drawn.append((config, name, entry.shape, spec.std, offsets, view))
            else:
                view.fill_({"ones": 1.0, "zeros": 0.0}[spec.init])
    with ThreadPoolExecutor(THREADS) as pool:  # numpy draws without the interpreter's lock.
        for done in [pool.submit(_normal, *values) for values in drawn]:
            done.result()


@torch.no_grad()
def _normal(
    config: Config, name: str, shape: tuple[int, ...], std: float, offsets: tuple[int, ...], view: View
) -> None:
    """The box of the canonical tensor that begins at `offsets`, written to `view`."""
    first, *others = offsets
    last = first + view.shape[0]
    columns = tuple(slice(o, o + n) for o, n in zip(others, view.shape[1:], strict=True))
    for start in range(first - first % BLOCK, last, BLOCK):
        rows = draw(config, name, shape, std, start // BLOCK)
        low, high = max(first, start), min(last, start + rows.shape[0])
        view[low - first : high - first].copy_(rows[(slice(low - start, high - start), *columns)])


def draw(config: Config, name: str, shape: tuple[int, ...], std: float, block: int) -> Tensor:
    """fp32 rows `block * BLOCK` and on, `BLOCK` of them at most, of the canonical tensor `name`."""
    rows = min(BLOCK, shape[0] - block * BLOCK)
    values = generator(config, "init", name, block).standard_normal((rows, *shape[1:]), dtype="float32")
    return torch.from_numpy(values).mul_(std)
