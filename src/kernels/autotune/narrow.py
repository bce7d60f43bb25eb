"""Takes configs away from live Triton autotuners; no file is written (KDA-1 to 10)."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from src.kernels.autotune.rule import Rule
from src.kernels.toolchain import Toolchain

HOPS = 8
"""Wrappers that are looked through for the tuner of a kernel."""
ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class Outcome:
    """What a rule did to one kernel."""

    rule: str
    kernel: str
    status: str
    """`narrowed`, `already`, `would_empty`, `not_found`; of a rule `unused`, `not_applicable`."""
    kept: int = 0
    of: int = 0
    why: str = ""
    """Why nothing was done, or which unsafe kernels this process had compiled before."""

    def line(self) -> str:
        """For the log."""
        done = f"kept {self.kept} of {self.of}" if self.of else self.status
        return f"rule {self.rule}: {done} of {self.kernel}{f', {self.why}' if self.why else ''}"


class Clamped(dict[Any, Any]):
    """The winners of a tuner, none beyond a rule: a clamped copy takes an unsafe one's place.

    Whoever puts a winner in meets the rule: Triton's tuning, its disk cache, a package's own file. A dropped
    entry would be tuned again at every call; the config itself may stand in the list of another kernel.
    """

    def __init__(self, rule: Rule, winners: dict[Any, Any]) -> None:
        super().__init__()
        self._rule = rule
        self._before = winners if isinstance(winners, Clamped) else None
        self._copies: dict[int, tuple[Any, Any]] = {}
        for key, config in winners.items():
            self[key] = config

    def __setitem__(self, key: Any, config: Any) -> None:
        super().__setitem__(key, self.within(config))

    def within(self, config: Any) -> Any:
        """The config, or its copy within this rule and those applied before."""
        if self._before is not None:
            config = self._before.within(config)
        return config if self._rule.keep(config) else self._clamped(config)

    def _clamped(self, config: Any) -> Any:
        """One copy for all keys that share a config; the original is held, so that its id stays its own."""
        if id(config) not in self._copies:
            self._copies[id(config)] = config, clamped(self._rule, config)
        return self._copies[id(config)][1]


@contextmanager
def narrowed(rules: Iterable[Rule], toolchain: Toolchain, used: Collection[str]) -> Iterator[list[Outcome]]:
    """Apply the rules; on the way out every tuner has what it had before.

    Args:
        rules: in the order in which they are applied.
        toolchain: what the rules are asked about.
        used: packages that this run uses; the modules of others are not imported (KDA-5, REG-6).
    """
    undo: list[tuple[Any, Any, Any]] = []
    try:
        yield [outcome for rule in rules for outcome in apply(rule, toolchain, used, undo)]
    finally:
        for tuner, configs, cache in reversed(undo):
            tuner.configs, tuner.cache = configs, cache


def apply(
    rule: Rule, toolchain: Toolchain, used: Collection[str], undo: list[tuple[Any, Any, Any]]
) -> list[Outcome]:
    """What one rule does; `undo` gets each changed tuner with its former configs and winners."""
    absent = rule.absent(toolchain)
    if absent is not None:
        return [Outcome(rule.id, rule.module, "not_applicable", why=absent)]
    if rule.root not in used:
        return [Outcome(rule.id, rule.module, "unused", why=f"this run does not use {rule.root}")]
    try:
        module = import_module(rule.module)
    except ImportError as error:
        return [_warned(Outcome(rule.id, rule.module, "not_found", why=str(error)))]
    with ONE_AT_A_TIME:
        return [narrow(rule, name, find_tuner(quietly(module, name)), undo) for name in rule.kernels]


def narrow(rule: Rule, kernel: str, tuner: Any | None, undo: list[tuple[Any, Any, Any]]) -> Outcome:
    """Give a tuner the configs that the rule keeps, in their order, and clamp its cached winners."""
    if tuner is None:
        why = f"{rule.module} has no tuned kernel of that name"
        return _warned(Outcome(rule.id, kernel, "not_found", why=why))
    kept = [config for config in tuner.configs if rule.keep(config)]
    counts = (len(kept), len(tuner.configs))
    if not kept:
        return _warned(Outcome(rule.id, kernel, "would_empty", *counts, why="so nothing is changed"))
    if len(kept) == len(tuner.configs) and all(map(rule.keep, tuner.cache.values())):
        return Outcome(rule.id, kernel, "already", *counts)
    undo.append((tuner, tuner.configs, tuner.cache))
    tuner.configs, tuner.cache = kept, Clamped(rule, tuner.cache)
    built = compiled_beyond(rule, tuner)
    why = f"{built} unsafe kernels were compiled before" if built else ""
    return Outcome(rule.id, kernel, "narrowed", *counts, why=why)


def clamped(rule: Rule, config: Any) -> Any:
    """A copy of a config within the rule's bounds, equal in everything else."""
    found = copy(config)
    found.kwargs = dict(config.kwargs)
    for name, most in rule.clamp.items():
        if name in found.kwargs:
            found.kwargs[name] = min(found.kwargs[name], most)
        else:
            setattr(found, name, min(getattr(found, name), most))
    assert rule.keep(found), (rule.id, str(found))
    return found


def find_tuner(kernel: object) -> Any | None:
    """The autotuner in a stack of heuristics, tuner, jit and foreign wrappers, in any order (KDA-1)."""
    for layer in _layers(kernel):
        configs, cache = quietly(layer, "configs"), quietly(layer, "cache")
        if isinstance(configs, list) and configs and isinstance(cache, dict):
            return layer
    return None


def compiled_beyond(rule: Rule, tuner: object) -> int:
    """Kernels that this process compiled from configs beyond the bounds (KDA-10)."""
    found = 0
    for layer in _layers(tuner):
        by_device = quietly(layer, "device_caches")
        for parts in by_device.values() if isinstance(by_device, dict) else ():
            found += sum(_beyond(rule, quietly(kernel, "metadata")) for kernel in parts[0].values())
    return found


def _beyond(rule: Rule, metadata: object) -> bool:
    return any((quietly(metadata, name) or 0) > most for name, most in rule.clamp.items())


def quietly(owner: object, name: str) -> Any | None:
    """An attribute, or None where it is absent or raises."""
    try:
        return getattr(owner, name)
    except Exception:
        return None


def _layers(kernel: object) -> list[object]:
    """A kernel and what it wraps, at most `HOPS` deep, each once."""
    found: list[object] = []
    while kernel is not None and len(found) <= HOPS and not any(kernel is layer for layer in found):
        found.append(kernel)
        kernel = quietly(kernel, "fn")
    return found


def _warned(outcome: Outcome) -> Outcome:
    warnings.warn(outcome.line(), RuntimeWarning)
    return outcome
