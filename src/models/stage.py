"""Which part of a model a rank builds; numbers only, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from src.models.schema import ModelConfig


@dataclass(frozen=True)
class Stage:
    """A contiguous run of layers and the experts held of each; global numbers throughout (TRAP-5)."""

    layers: range
    """Global indices of the decoder layers."""
    first: bool
    """Holds the embedding."""
    last: bool
    """Holds the final norm and the head."""
    experts: range
    """Global ids of the routed experts held here."""


def whole(config: ModelConfig) -> Stage:
    """The whole model on one rank."""
    return Stage(range(config.num_layers), first=True, last=True, experts=range(config.num_experts))
