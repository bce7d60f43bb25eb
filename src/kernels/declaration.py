"""What an implementation of an operation declares about itself (REG-1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from packaging.specifiers import SpecifierSet

EAGER = "eager"
"""Name of the reference in plain torch, which every operation has and which runs everywhere."""


HOPPER_ON = frozenset({"sm90", "sm100", "sm103", "sm120"})
"""Architectures that have what Hopper brought."""

AMPERE_ON = HOPPER_ON | {"sm80", "sm86", "sm87", "sm89"}
"""Those that have what Ampere brought."""


@dataclass(frozen=True)
class Device:
    """The device and what is installed, as far as capabilities go; a made-up one serves in tests."""

    kind: str
    """`cpu`, `cuda` or `rocm`."""
    arch: str
    """`cpu`, or an architecture such as `sm90` or `gfx942`."""
    interprets: bool = False
    """Whether Triton runs kernels on a CPU, in its interpreter."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Installed distribution → its version, of those that an implementation asks for."""
    card: str = ""
    """What the device calls itself; decides nothing."""


@dataclass(frozen=True)
class Need:
    """What a model asks of one operation."""

    features: frozenset[str] = frozenset()
    """Abilities: `packed` (documents stay apart), `unequal_widths` (value and key heads of two widths), `gqa`
    (fewer heads of keys and values than of queries), `window` (keys too far back are not seen), `sinks` (one
    more logit in the denominator of a softmax), `clamped` (a gated activation within bounds),
    `biased_experts` (experts with biases), `fp8_experts` (experts whose products run in fp8),
    `context_parallel` (keys come in blocks, forward and backward, with the log-sum-exp over all blocks)."""
    widths: Mapping[str, int] = field(default_factory=dict)
    """Sizes that a shape predicate reads, such as `in` and `out` of a grouped product."""

    def plus(self, feature: str) -> Need:
        """The same need and one more ability."""
        return replace(self, features=self.features | {feature})

    def without(self, feature: str) -> Need:
        """The same need but for one ability."""
        return replace(self, features=self.features - {feature})


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation, with everything that decides whether it may run."""

    operation: str
    name: str
    function: Callable[..., Any]
    deterministic: tuple[bool, bool]
    """Whether two runs of the forward, and of the backward, are bitwise equal."""
    saves: str
    """What the backward pass keeps."""
    by_switch: bool = False
    """Whether the backward is so only under torch's switch for deterministic algorithms, which
    determinism=bitwise sets (DET-6)."""
    source: str = "torch"
    """What it is made of: `torch` (plain operations), `library` (another's kernel) or `triton` (ours)."""
    devices: frozenset[str] | None = None
    """Device kinds; None is any."""
    archs: frozenset[str] | None = None
    """Architectures; None is any of those kinds."""
    dtypes: frozenset[torch.dtype] | None = None
    """Dtypes of its tensors; None is any floating dtype."""
    features: frozenset[str] = frozenset()
    """Abilities it has, of those that a `Need` may name."""
    apart: tuple[frozenset[str], ...] = ()
    """Abilities that it has one by one, and not together."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Distribution → versions that it was written for, as a specifier such as `>=4,<5`."""
    shapes: Callable[[Mapping[str, int], torch.dtype], str | None] = lambda widths, dtype: None
    """The missing capability in a sentence, if the widths do not fit."""

    def missing(self, device: Device, dtype: torch.dtype, need: Need, bitwise: bool) -> str | None:
        """One sentence naming the first capability that is missing, or None if the implementation may run."""
        interpreted = self.source == "triton" and device.kind == "cpu"
        lacks = self._interpreter(device, dtype) if interpreted else self._device(device, dtype)
        if lacks is not None:
            return lacks
        if need.features - self.features:
            return f"cannot do {_listed(need.features - self.features)}"
        for together in self.apart:
            if together <= need.features:
                return f"cannot do {_listed(together)} together"
        for package, versions in self.packages.items():
            found = device.packages.get(package)
            if found is None or not SpecifierSet(versions).contains(found, prereleases=True):
                return f"needs {package} {versions}, and {found or 'none'} is installed"
        if bitwise and not all(self.deterministic):
            return "is not deterministic, which determinism=bitwise asks for"
        return self.shapes(need.widths, dtype)

    def _device(self, device: Device, dtype: torch.dtype) -> str | None:
        if self.devices is not None and device.kind not in self.devices:
            return f"runs on {_listed(self.devices)}, not on {device.kind}"
        if self.archs is not None and device.arch not in self.archs:
            return f"runs on {_listed(self.archs)}, not on {device.arch}"
        if self.dtypes is not None and dtype not in self.dtypes:
            return f"takes {_listed(map(_short, self.dtypes))}, not {_short(dtype)}"
        return None

    def _interpreter(self, device: Device, dtype: torch.dtype) -> str | None:
        """As `_device`, on a CPU: arithmetic in bf16 is wrong there without an error (INT-1)."""
        if not device.interprets:
            return "runs on a CPU in Triton's interpreter only, which TRITON_INTERPRET=1 asks for"
        if dtype != torch.float32:
            return f"takes float32 in Triton's interpreter, not {_short(dtype)}"
        return None


def _listed(words: Iterable[str]) -> str:
    return ", ".join(sorted(words))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
