"""What an adaptive sweep may try: a domain for each swept key, in Hydra's grammar (SWEEP-10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from src.errors import Problem, UserError

Value = str | int | float


@dataclass(frozen=True)
class Domain:
    """The values of one key: some texts, or the numbers from `low` to `high`, both included."""

    choices: tuple[str, ...] = ()
    low: float | int = 0
    high: float | int = 0
    step: float | int | None = None
    log: bool = False

    @property
    def first(self) -> Value:
        """One of them."""
        return self.choices[0] if self.choices else self.low

    @property
    def is_whole(self) -> bool:
        """Whether they are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)


@dataclass(frozen=True)
class Space:
    """What is fixed and what is searched."""

    fixed: tuple[str, ...]
    domains: Mapping[str, Domain]

    def overrides(self, values: Mapping[str, Value]) -> list[str]:
        """Of the job that tries `values`."""
        return [*self.fixed, *(f"{key}={text(values[key])}" for key in self.domains)]

    def corner(self) -> list[str]:
        """Of a job that tries the first value of each domain."""
        return self.overrides({key: domain.first for key, domain in self.domains.items()})


def text(value: Value) -> str:
    """A value as one types it; a float in its shortest round-trip form."""
    return repr(value) if isinstance(value, float) else str(value)


def read_space(lines: Sequence[str]) -> Space:
    """The space that overrides span; a later line for a key wins.

    Raises:
        UserError: nothing is swept, or a domain that cannot be searched (2).
    """
    parsed = {o.get_key_element(): o for o in OverridesParser.create().parse_overrides(list(lines))}
    swept = {key: override for key, override in parsed.items() if override.is_sweep_override()}
    if not swept:
        fix = "type for example 'optimizer.lr=tag(log,interval(1e-4,1e-1))' or mesh=single,ep2"
        raise UserError([Problem("hydra/sweeper", "no key has several values to try", fix, "SWEEP-10")])
    fixed = [
        f"{key}={override.get_value_element_as_str()}" for key, override in parsed.items() if key not in swept
    ]
    return Space(tuple(fixed), {key: domain(key, override) for key, override in swept.items()})


def domain(key: str, override: Override) -> Domain:
    """The values of one swept override; raises `UserError` (2) where they cannot be listed or measured."""
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return Domain(choices=tuple(dict.fromkeys(override.sweep_string_iterator())))
    if isinstance(value, RangeSweep) and "log" not in value.tags:
        numbers = [n if isinstance(n, int) else float(n) for n in value.range()]
        step = value.step if isinstance(value.step, int) else float(value.step)
        if numbers:
            return Domain(low=min(numbers), high=max(numbers), step=abs(step))
    if isinstance(value, IntervalSweep) and value.start is not None and value.end is not None:
        low, high, log = value.start, value.end, "log" in value.tags
        if low < high and (low > 0 or not log):
            return Domain(low=low, high=high, log=log)
    fix = "type a list, range(0,10,2), interval(0,1) or tag(log,interval(1e-4,1e-1)), the lower end first"
    raise UserError([Problem(key, f"{override.input_line} spans no values to try", fix, "SWEEP-10")])
