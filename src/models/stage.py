"""Which part of a model a rank builds, and which runs of its layers a micro-batch passes; no torch here."""

from __future__ import annotations

from dataclasses import dataclass

from src.models.schema import ModelConfig


@dataclass(frozen=True)
class Stage:
    """A contiguous run of layers that a micro-batch passes on one rank; global numbers (TRAP-5)."""

    layers: range
    """Global indices of the decoder layers."""
    first: bool
    """Starts with the embedding."""
    last: bool
    """Ends with the final norm and the head."""


@dataclass(frozen=True)
class Holding:
    """What one rank holds: the stages of a pipeline that are its own, and its experts of each layer."""

    stages: tuple[Stage, ...]
    """In the order in which a micro-batch passes them."""
    experts: range
    """Global ids of the routed experts held here."""

    @property
    def layers(self) -> list[int]:
        """Global indices of all decoder layers held."""
        return [index for stage in self.stages for index in stage.layers]

    @property
    def first(self) -> bool:
        """Holds the embedding."""
        return any(stage.first for stage in self.stages)

    @property
    def last(self) -> bool:
        """Holds the final norm and the head."""
        return any(stage.last for stage in self.stages)


def whole(config: ModelConfig) -> Holding:
    """The whole model on one rank."""
    return Holding((Stage(range(config.num_layers), first=True, last=True),), range(config.num_experts))


def alone(stage: Stage, experts: range) -> Holding:
    """One stage."""
    return Holding((stage,), experts)
