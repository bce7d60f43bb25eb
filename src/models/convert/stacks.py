"""transformers stacks experts in memory as we do, under other names, and writes them apart again (HFN)."""

from __future__ import annotations

from dataclasses import replace

from src.models.names import Entry

STACKS = {".experts.gate_up": ".experts.gate_up_proj", ".experts.down": ".experts.down_proj"}
"""End of a stack's name here → in transformers' module; shapes and order of rows are the same (FFN-2)."""


def hf_entry(entry: Entry) -> Entry:
    """Where transformers' model holds what our parameter of that entry does."""
    for ours, theirs in STACKS.items():
        if entry.parameter.endswith(ours):
            return replace(entry, parameter=entry.parameter.removesuffix(ours) + theirs)
    return entry
