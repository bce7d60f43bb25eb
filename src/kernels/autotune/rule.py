"""A rule that narrows what somebody else's autotuner may try, as data that expires by itself (KDA)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet

from src.kernels.toolchain import Toolchain


@dataclass(frozen=True)
class Rule:
    """Which configs of which kernels must not be tried, where, why and until when."""

    id: str
    module: str
    """Dotted name of the module that holds the kernels."""
    kernels: tuple[str, ...]
    """Names of the tuned kernels there."""
    when: Callable[[Toolchain], bool]
    """Whether the fault can be there; its docstring is what `--list` prints.

    No rule asks for an architecture: what is wrong on one chip is taken to be wrong on the next (KDA-14)."""
    versions: Mapping[str, str]
    """Package → versions that have the fault; each ends somewhere."""
    keep: Callable[[Any], bool]
    """Whether a `triton.Config` may be tried."""
    clamp: Mapping[str, int]
    """Field or meta-parameter → the most it may be in a winner that was cached before."""
    reason: str
    remove_when: str
    measured_cost: str
    """What narrowing costs: the kernel, the operation, from end to end; and what it costs without need."""

    def __post_init__(self) -> None:
        """Raises ValueError if a package has no upper version bound, or none is named."""
        open_ended = [name for name, versions in self.versions.items() if not is_bounded(versions)]
        if open_ended or not self.versions:
            raise ValueError(f"rule {self.id} never expires: bound {open_ended or 'a package'} from above")

    @property
    def root(self) -> str:
        """The package that the module belongs to."""
        return self.module.partition(".")[0]

    def absent(self, toolchain: Toolchain) -> str | None:
        """Why the rule has no business here; None if it has. Imports nothing (KDA-5)."""
        if not self.when(toolchain):
            return f"{toolchain.device}: not {self.when.__doc__}"
        return toolchain.outside(self.versions)


def is_bounded(versions: str) -> bool:
    """Whether a specifier ends somewhere."""
    return any(part.operator in ("<", "<=", "==") for part in SpecifierSet(versions))


def table(*rules: Rule) -> tuple[Rule, ...]:
    """The rules, each id once; raises ValueError otherwise."""
    ids = [rule.id for rule in rules]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise ValueError(f"two rules have the id {', '.join(twice)}")
    return rules
