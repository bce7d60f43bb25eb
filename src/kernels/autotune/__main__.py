"""`python -m src.kernels.autotune --list`: the rules, their gates, reasons and whether each applies here."""

from __future__ import annotations

import argparse

from src.kernels.autotune.rule import Rule
from src.kernels.autotune.rules import RULES
from src.kernels.toolchain import Toolchain, find_toolchain


def describe(rule: Rule, toolchain: Toolchain) -> str:
    """One rule as text."""
    absent = rule.absent(toolchain)
    versions = ", ".join(f"{name} {versions}" for name, versions in rule.versions.items())
    clamp = ", ".join(f"{name} at most {most}" for name, most in rule.clamp.items())
    lines = {
        "kernels": f"{rule.module}: {', '.join(rule.kernels)}",
        "keeps": clamp,
        "gate": f"{rule.when.__doc__}, {versions}",
        "here": "applies" if absent is None else f"does not apply: {absent}",
        "reason": rule.reason,
        "cost": rule.measured_cost,
        "until": rule.remove_when,
    }
    return "\n".join([rule.id, *(f"  {name:8s} {text}" for name, text in lines.items())])


def device_kind() -> str:
    """The kind of device that torch was built for and finds."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return "rocm" if torch.version.hip else "cuda"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m src.kernels.autotune", description=__doc__)
    parser.add_argument("--list", action="store_true", required=True, help="print every rule")
    parser.parse_args()
    toolchain = find_toolchain(device_kind())
    print("\n\n".join(describe(rule, toolchain) for rule in RULES))


if __name__ == "__main__":
    main()
