"""Which implementation of each operation runs: declared, resolved once, recorded (REG-1 to REG-4).

Every file of an operation lists its implementations in `IMPLEMENTATIONS`, the reference named `eager` among
them. Whether one is available is a pure question about declared facts; it needs no such device. Nothing falls
back later: what `resolve` chose runs, or the run ends.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from src.code_identity import package_version
from src.errors import Problem, UserError
from src.kernels.declaration import EAGER, Device, Implementation, Need
from src.kernels.table import IMPLEMENTATIONS

if TYPE_CHECKING:
    from src.config import DeterminismConfig, KernelsConfig


@dataclass(frozen=True)
class Choice:
    """What was chosen for one operation, and why not the others."""

    name: str
    refused: Mapping[str, str]
    """Candidate that cannot run → the capability it misses."""
    implementation: Implementation | None = None
    """What it declares; None in tests that stand something else in."""


@dataclass(frozen=True)
class Ops:
    """The chosen function of each operation; shapes and errors stand in the operation's file."""

    attention: Callable[..., Any]
    grouped_mm: Callable[..., Any]
    grouped_mm_fp8: Callable[..., Any]
    expert_bias: Callable[..., Any]
    route: Callable[..., Any]
    sort_by_expert: Callable[..., Any]
    permute: Callable[..., Any]
    combine: Callable[..., Any]
    local_experts: Callable[..., Any]
    swiglu: Callable[..., Any]
    rms_norm: Callable[..., Any]
    rope: Callable[..., Any]
    rotary_heads: Callable[..., Any]
    latent_heads: Callable[..., Any]
    router_linear: Callable[..., Any]
    linear: Callable[..., Any]
    linear_fp8: Callable[..., Any]
    quantise_weight: Callable[..., Any]
    linear_cross_entropy: Callable[..., Any]
    accumulate: Callable[..., Any]
    grad_norm: Callable[..., Any]
    adamw: Callable[..., Any]
    device: Device
    choices: Mapping[str, Choice]

    @property
    def fuses_experts(self) -> bool:
        """Whether a layer whose experts are all here computes its stages 2 to 5 as one operation."""
        return self.choices["local_experts"].name != EAGER

    def record(self) -> dict[str, Any]:
        """The content of `kernels.json`: per operation the choice and each refused candidate (REG-3)."""
        operations = {operation: _recorded(choice) for operation, choice in self.choices.items()}
        device = {"kind": self.device.kind, "arch": self.device.arch, "card": self.device.card}
        packages = {"triton", *(p for choice in self.choices.values() for p in _packages(choice))}
        versions = {package: self.device.packages.get(package) for package in sorted(packages)}
        return {"operations": operations, "device": device, "torch": torch.__version__, "packages": versions}


@dataclass(frozen=True)
class Case:
    """Needs of one operation for which `auto` has an order of its own."""

    words: str
    """Which they are."""
    holds: Callable[[Need], bool]
    order: tuple[str, ...]


OPERATIONS = tuple(f.name for f in fields(Ops) if f.name not in ("device", "choices"))

# By measured rates (LOG.md), the padded one last, which only determinism=bitwise comes to. `flex_attention`
# is taken by name only: on the one card where it ran, an access beyond its memory followed (LOG.md).
_WHOLE, _REST = ("sdpa_cudnn", "sdpa_flash", "varlen_attn"), ("sdpa_efficient", "sdpa_flash_padded")
ATTENTION = (*_WHOLE, "flash_attn_4", *_REST)

# Order in which `auto` tries the implementations, by device kind; the reference comes last everywhere. An
# operation without a row has the reference only. The order on CPU was measured (LOG.md).
AUTO: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "cpu": {"attention": ("sdpa_cpu",), "grouped_mm": ("torch_grouped_mm",)},
    "cuda": {
        "attention": ATTENTION,
        "grouped_mm": ("quack", "torch_grouped_mm_cuda"),
        "grouped_mm_fp8": ("scaled_grouped_mm",),
        "local_experts": ("quack",),
        "route": ("triton",),
        "sort_by_expert": ("triton",),
        "permute": ("triton",),
        "combine": ("triton",),
        "expert_bias": ("triton",),
        "rope": ("real",),
        "rotary_heads": ("triton", "real"),
        "latent_heads": ("triton", "real"),
        "router_linear": ("split",),
        "swiglu": ("triton",),
        "linear_fp8": ("scaled_mm",),
        "quantise_weight": ("triton",),
        "linear_cross_entropy": ("triton",),
        "accumulate": ("triton",),
        "grad_norm": ("triton",),
        "adamw": ("triton",),
    },
}

CASES: Mapping[tuple[str, str], tuple[Case, ...]] = {
    ("cuda", "attention"): (
        Case(
            "windows or sinks",
            lambda need: bool(need.features & {"window", "sinks"}),
            ("flash_attn_4", "sdpa_cudnn", "varlen_attn", "sdpa_flash_padded"),
        ),
        Case(
            "heads of 64 numbers",
            lambda need: need.widths.get("key") == 64,
            ("flash_attn_4", *_WHOLE, *_REST),
        ),
    )
}
"""Device kind and operation → the cases that come before its row of `AUTO`, the first that holds counts."""


def resolve(
    kernels: KernelsConfig,
    device: torch.device,
    dtype: torch.dtype,
    determinism: DeterminismConfig,
    needs: Mapping[str, Need],
) -> Ops:
    """Choose an implementation of every operation, once, when the model is built.

    `dtype` is that of compute; `needs` says per operation what the model will ask for (`build.needs`).
    Raises `UserError` (code 3) that lists every explicit choice which is unavailable.
    """
    return choose(kernels, describe(device), dtype, determinism, needs)


def choose(
    kernels: KernelsConfig,
    device: Device,
    dtype: torch.dtype,
    determinism: DeterminismConfig,
    needs: Mapping[str, Need],
) -> Ops:
    """As `resolve`, for a device that need not exist."""
    bitwise = determinism.name == "bitwise"
    problems: list[Problem] = []
    without: dict[str, list[str]] = {}
    functions: dict[str, Callable[..., Any]] = {}
    choices: dict[str, Choice] = {}
    for operation, known in implementations().items():
        wanted = getattr(kernels, operation, None)
        need = needs.get(operation, Need())
        lacks = {name: impl.missing(device, dtype, need, bitwise) for name, impl in known.items()}
        if wanted is not None and (wanted not in known or lacks[wanted]):
            problems.append(_unavailable(operation, wanted, lacks))
            continue
        order = (wanted,) if wanted is not None else _order(kernels.name, device, operation, known, need)
        name = next((name for name in order if lacks[name] is None), None)
        if name is None:  # Only of kernels=triton, which leaves nothing in Triton to the reference.
            without.setdefault(f"{order[0]} {lacks[order[0]]}", []).append(operation)
            continue
        refused = {other: why for other, why in lacks.items() if why is not None}
        functions[operation], choices[operation] = known[name].function, Choice(name, refused, known[name])
    problems += [_unavailable_here(why, operations) for why, operations in without.items()]
    if problems:
        raise UserError(problems, code=3)
    return Ops(**functions, device=device, choices=choices)


def implementations() -> dict[str, dict[str, Implementation]]:
    """Every operation's implementations by name, gathered from the operations' files."""
    return {operation: {i.name: i for i in IMPLEMENTATIONS[operation]} for operation in OPERATIONS}


def describe(device: torch.device) -> Device:
    """The capabilities of a real device, and the packages there are; none of them is imported."""
    packages = _installed()
    if device.type != "cuda":
        interprets = os.environ.get("TRITON_INTERPRET") == "1"
        return Device(device.type, device.type, interprets, packages, platform.machine())
    properties = torch.cuda.get_device_properties(device)
    kind, arch = "cuda", f"sm{properties.major}{properties.minor}"
    if torch.version.hip:
        kind, arch = "rocm", str(properties.gcnArchName).split(":")[0]
    return Device(kind, arch, packages=packages, card=str(properties.name))


def _installed() -> dict[str, str]:
    asked = {package for known in IMPLEMENTATIONS.values() for i in known for package in i.packages}
    found = {package: package_version(package) for package in ("triton", *sorted(asked))}
    return {package: version for package, version in found.items() if version is not None}


def _order(
    name: str, device: Device, operation: str, known: Mapping[str, Implementation], need: Need
) -> tuple[str, ...]:
    """What is tried in turn. `library` takes another's kernel where there is one, `triton` ours."""
    auto = AUTO.get(device.kind, {}).get(operation, ())
    auto = next((c.order for c in CASES.get((device.kind, operation), ()) if c.holds(need)), auto)
    if name == EAGER:
        return (EAGER,)
    if name == "auto":
        return (*auto, EAGER)
    made = tuple(sorted((i for i in known if known[i].source == name), key=lambda i: (*auto, i).index(i)))
    return made if name == "triton" and made else (*made, EAGER)


def _recorded(choice: Choice) -> dict[str, Any]:
    record: dict[str, Any] = {"choice": choice.name, "refused": dict(choice.refused)}
    if choice.implementation is not None:
        forward, backward = choice.implementation.deterministic
        record |= {"deterministic": {"forward": forward, "backward": backward}}
        record |= {"saves": choice.implementation.saves}
    return record


def _packages(choice: Choice) -> Iterable[str]:
    return () if choice.implementation is None else choice.implementation.packages


def _unavailable(operation: str, wanted: str, lacks: Mapping[str, str | None]) -> Problem:
    available = ", ".join(name for name, why in lacks.items() if why is None)
    why = f"{wanted} {lacks[wanted]}" if wanted in lacks else f"there is no implementation {wanted!r}"
    return Problem(f"kernels.{operation}", why, f"available: {available}", "REG-2")


def _unavailable_here(why: str, operations: list[str]) -> Problem:
    """One problem for all operations that `kernels=triton` cannot give for the same reason."""
    words = " ".join(f"kernels.{operation}=eager" for operation in operations)
    return Problem("kernels", f"{why}: {', '.join(operations)}", f"kernels=auto, or {words}", "REG-2")
