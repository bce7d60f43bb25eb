"""The device and the package versions that rules and quirks ask about; imports none of the packages."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from src.code_identity import package_version

DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "numpy": ("numpy",),
    "triton": ("triton", "triton-rocm", "pytorch-triton-rocm"),
    "fla": ("fla-core", "flash-linear-attention"),
    "flash_attn": ("flash-attn",),
    "flash_attn_4": ("flash-attn-4",),
}
"""What we call a package → the distributions that bring it, the first installed one counts.

torch's wheels for AMD devices bring Triton under another name."""


@dataclass(frozen=True)
class Toolchain:
    """What decides whether a fault of somebody else's code is there."""

    device: str
    """`cpu`, `cuda` or `rocm`."""
    versions: Mapping[str, str | None]
    """Our name of a package → its version, None where it is not installed."""
    interpreted: bool = False
    """Whether Triton's kernels run in its interpreter."""

    def outside(self, wanted: Mapping[str, str]) -> str | None:
        """The first package whose version is not in its specifier, in words; None if all are."""
        for package, versions in wanted.items():
            found = self.versions.get(package)
            if found is None:
                return f"{package} is not installed"
            if not SpecifierSet(versions).contains(found, prereleases=True):
                return f"{package} {found} is not {versions}"
        return None


def find_toolchain(device: str) -> Toolchain:
    """The toolchain of this process on a device of that kind."""
    versions = {
        name: next(filter(None, map(package_version, names)), None) for name, names in DISTRIBUTIONS.items()
    }
    return Toolchain(device, versions, os.environ.get("TRITON_INTERPRET") == "1")
