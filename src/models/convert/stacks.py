"""transformers stacks experts in memory as we do, under other names, and writes them apart again (HFN)."""

from __future__ import annotations

STACKS = {".experts.gate_up": ".experts.gate_up_proj", ".experts.down": ".experts.down_proj"}
"""End of a stack's name here → in transformers' module; shapes and order of rows are the same (FFN-2)."""


def hf_parameter(name: str) -> str:
    """Name in `named_parameters()` of transformers' model, from that of ours."""
    for ours, theirs in STACKS.items():
        if name.endswith(ours):
            return name.removesuffix(ours) + theirs
    return name
