"""One config for each key of a tuned Triton kernel, without timing: `kernels.autotune=pinned` (KDA-13).

Timing picks differently from run to run, and another tile is another order of summation. Pinned, a kernel
takes the first config that the rules and its own pruning leave, or the one that the run's files name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = "autotune"
"""Name in the run directory."""
Pins = dict[str, dict[str, dict[str, Any]]]
"""Kernel → key as text → fields of its config."""


@contextmanager
def pinned(folder: Path, rank: int) -> Iterator[None]:
    """Let every autotuner of this process take pinned configs, those of Triton's subclasses included.

    Args:
        folder: the files with the pins of former attempts, if there were any.
        rank: whose file new pins are written to.
    """
    from triton.runtime.autotuner import Autotuner

    original, known, mine = Autotuner.run, read(folder), Pins()
    taken: dict[tuple[Any, Any], Any] = {}

    def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        if len(tuner.configs) > 1:
            key = key_of(tuner, args, kwargs)
            if (tuner, key) not in taken:
                fields = known.get(name_of(tuner), {}).get(str(key))
                chosen = first(tuner, key, args, kwargs) if fields is None else config_of(tuner, fields)
                tuner.cache[key] = chosen
                taken[tuner, key] = tuner.cache[key]  # A rule may have had a say.
                mine.setdefault(name_of(tuner), {})[str(key)] = fields_of(chosen)
                write(folder / f"rank_{rank}.json", mine)
            elif tuner.cache.get(key) is not taken[tuner, key]:
                tuner.cache[key] = taken[tuner, key]
        return original(tuner, *args, **kwargs)

    Autotuner.run = run
    try:
        yield
    finally:
        Autotuner.run = original


def first(tuner: Any, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The config that a package's own file has put in, else the first that may be tried."""
    if key in tuner.cache:
        return tuner.cache[key]
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    return next(iter(tuner.prune_configs(kwargs)))


def key_of(tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The key under which Triton looks for a winner: the named arguments, then the dtypes of all."""
    given = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
    known = {name: value for name, value in given.items() if name in tuner.arg_names}
    dtypes = [str(value.dtype) for value in known.values() if hasattr(value, "dtype")]
    return (*(known[name] for name in tuner.keys if name in known), *dtypes)


def name_of(tuner: Any) -> str:
    """Module and name of the kernel's function."""
    return f"{tuner.base_fn.__module__}.{tuner.base_fn.__qualname__}"


def fields_of(config: Any) -> dict[str, Any]:
    """What a file says of a config; a hook is code and stays out."""
    return {name: value for name, value in vars(config).items() if name != "pre_hook"}


def config_of(tuner: Any, fields: dict[str, Any]) -> Any:
    """The tuner's own config with these fields, its hook with it; a new one if it has none such."""
    from triton import Config

    own = (config for config in tuner.configs if fields_of(config) == fields)
    return next(own, None) or Config(**fields)


def read(folder: Path) -> Pins:
    """The pins of all ranks; they chose alike."""
    found = Pins()
    for path in sorted(folder.glob("rank_*.json")):
        for kernel, of_kernel in json.loads(path.read_text()).items():
            found.setdefault(kernel, {}).update(of_kernel)
    return found


def write(path: Path, pins: Pins) -> None:
    """Replace the file in one rename."""
    path.parent.mkdir(exist_ok=True)
    draft = path.with_name(f".{path.name}")
    draft.write_text(json.dumps(pins, indent=2, sort_keys=True) + "\n")
    draft.rename(path)
