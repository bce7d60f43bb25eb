"""Initial weights: value = f(seed, canonical name, block of rows), so the mesh cannot matter (ENG-9).

A rank draws only the blocks that it holds, on the CPU in fp32, and casts: the same bits on every device, and
no full tensor in memory. Each expert has its own names, so no two are clones. One core draws some 0.1 billion
values a second, so that a model of billions waits for it: the blocks are shared out over the rank's threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from src.config import Config
from src.models.build import ParamSpec
from src.seeds import generator
from src.trainer.parallel.shards import LocalEntry

BLOCK = 1024
"""Rows that one generator draws."""


def initialise(config: Config, entries: Mapping[str, LocalEntry], specs: Mapping[str, ParamSpec]) -> None:
    """Fill this rank's parameters by the rules of `specs`, which are keyed by module name."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        parts = [
            pool.submit(_fill, config, name, entry, specs[entry.parameter], offsets[0], view)
            for name, entry in entries.items()
            for offsets, view in entry.parts
        ]
    for part in parts:
        part.result()


@torch.no_grad()  # A thread's own setting.
def _fill(config: Config, name: str, entry: LocalEntry, spec: ParamSpec, first: int, view: Tensor) -> None:
    if spec.init == "normal":
        _normal(config, name, entry.shape, spec.std, first, view)
    else:
        view.fill_({"ones": 1.0, "zeros": 0.0}[spec.init])


def _normal(config: Config, name: str, shape: tuple[int, ...], std: float, first: int, view: Tensor) -> None:
    """Rows `first` and on of the canonical tensor, written to `view`; only whole rows are ever cut off."""
    last = first + view.shape[0]
    for start in range(first - first % BLOCK, last, BLOCK):
        rows = draw(config, name, shape, std, start // BLOCK)
        low, high = max(first, start), min(last, start + rows.shape[0])
        view[low - first : high - first].copy_(rows[low - start : high - start])


def draw(config: Config, name: str, shape: tuple[int, ...], std: float, block: int) -> Tensor:
    """fp32 rows `block * BLOCK` and on, `BLOCK` of them at most, of the canonical tensor `name`."""
    rows = min(BLOCK, shape[0] - block * BLOCK)
    values = generator(config, "init", name, block).standard_normal((rows, *shape[1:]), dtype="float32")
    values *= std  # By numpy: torch would start threads of its own in each of ours.
    return torch.from_numpy(values)
