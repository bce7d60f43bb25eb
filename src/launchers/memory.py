"""Bytes of each rank: parameters, gradients and moments exactly, from shapes, and what a step adds (PROJ)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

from src.config import Config
from src.launchers.layer_form import Form, form_of
from src.launchers.peak import Gradients, Peak, fullest
from src.models.names import is_expert_stack, is_router, parameters
from src.trainer.parallel.layout import (
    Coordinates,
    coordinates,
    is_sharded,
    is_staged,
    last_rank,
    micro_batches,
    split_layers,
    stage_count,
    stages_of,
)
from src.validate_fp8 import is_product

COMPUTE_BYTES = {"fp64": 8, "fp32": 4, "master": 2, "split": 2, "bf16": 2}
"""Bytes of a number in forward and backward, by precision."""
MASTER_BYTES = {"fp64": 8, "fp32": 4, "master": 4, "split": 4, "bf16": 2}
"""Bytes of a stored parameter (both its halves), of a sum of its gradients and of a moment, by precision."""
EMBEDDING = "model.embed_tokens"
HEAD = ("model.norm", "lm_head")

FP8_BYTES = 2
"""Bytes of a weight in fp8: it is there in two forms, whole on each rank."""


@dataclass(frozen=True)
class RankMemory:
    """What one rank holds, in bytes but for `parameters`."""

    parameters: int
    """Parameters of its shards."""
    weights: int
    """Masters, copies of them that compute on a rank which shares nothing, and weights in fp8."""
    gradients: int
    """Of its shards, when the update begins."""
    optimizer: int
    """Moments of its shards."""
    unsharded: int
    """Gathered copies of parameters in the dtype of compute, and their gradients not yet reduced."""
    activations: int
    """Estimate of what forward and backward hold at the fullest moment of a step, the rest left out."""
    pending: int
    """Gradients that are not there at that moment: yet to be made, or reduced."""

    @property
    def total(self) -> int:
        """Bytes at the fullest moment."""
        states = self.weights + self.gradients + self.optimizer + self.unsharded
        return states + self.activations - self.pending


def precision_name(config: Config, platform: str) -> str:
    """`precision.name` with `auto` settled: fp32 on a CPU, master on a GPU."""
    if config.precision.name != "auto":
        return config.precision.name
    return "fp32" if platform == "cpu" else "master"


def rank_memory(config: Config, rank: int, platform: str) -> RankMemory:
    """Bytes of one rank of a plan."""
    return Estimate(config, platform).of(rank)


def stages_held(config: Config, pp: int) -> list[range]:
    """Global indices of the layers of each stage of a pipeline rank, in the order of the forward pass."""
    layers = split_layers(config.model.num_layers, stage_count(config))
    return [layers[stage] for stage in stages_of(config, pp)]


def layers_of(config: Config, pp: int) -> list[int]:
    """Global indices of the layers that a pipeline rank holds."""
    return [layer for stage in stages_held(config, pp) for layer in stage]


@dataclass(frozen=True)
class Part:
    """Parameters of one shape and kind, as a pipeline rank holds them before they are cut into shards."""

    shape: tuple[int, ...]
    is_expert: bool
    is_wide: bool
    """Routers, which compute in the masters' dtype (MOD-4)."""
    is_fp8: bool
    """Its products run in fp8."""


class Estimate:
    """Bytes of the ranks of one config; what ranks share is counted once."""

    def __init__(
        self, config: Config, platform: str, form: Form | None = None, imbalance: float = 1.0
    ) -> None:
        """
        Args:
            config: resolved and valid.
            platform: `cpu`, `cuda` or `rocm`.
            form: how layers are computed; None is what the config will choose.
            imbalance: rows of the fullest rank's experts over those of an even routing (ep above 1).
        """
        precision = precision_name(config, platform)
        self._config, self._imbalance = config, imbalance
        self._form = form_of(config, platform) if form is None else form
        self._name = precision
        self._master, self._compute = MASTER_BYTES[precision], COMPUTE_BYTES[precision]
        self._sharded = is_sharded(config.mesh)
        names = parameters(config.model).items()
        self._parts = {name: self._part(name, shape) for name, shape in names}
        self._peaks: dict[int, Peak] = {}
        self._held = {pp: self._held_by(pp) for pp in range(config.mesh.pp)}

    def of(self, rank: int) -> RankMemory:
        """Bytes of one rank."""
        place = coordinates(self._config.mesh, rank)
        held = self._held[place.pp]
        local = {part: self._shard(part, place) * count for part, count in held.items()}
        whole = {part: prod(part.shape) * count for part, count in held.items()}
        if place.pp not in self._peaks:
            self._peaks[place.pp] = self._peak(place.pp)
        peak = self._peaks[place.pp]
        gradients = sum(size * self._gradient(part) for part, size in local.items())
        unsharded = sum(s * (self._used(p) + self._master) for p, s in whole.items()) * self._sharded
        made = gradients + sum(size * self._master for size in whole.values()) * self._sharded
        return RankMemory(
            parameters=sum(local.values()),
            weights=sum(size * self._weight(part) for part, size in local.items())
            + FP8_BYTES * sum(size for part, size in whole.items() if part.is_fp8),
            gradients=gradients,
            optimizer=sum(local.values()) * self._moments(),
            unsharded=unsharded,
            activations=peak.activations,
            pending=made - peak.gradients,
        )

    def _part(self, name: str, shape: tuple[int, ...]) -> Part:
        is_expert = is_expert_stack(name) and self._config.model.family != "hf"
        mine = (shape[0] // self._config.mesh.ep, *shape[1:]) if is_expert else shape
        return Part(mine, is_expert, is_router(name), is_product(name, shape, self._config.precision.fp8))

    def _held_by(self, pp: int) -> Counter[Part]:
        layers = {f"model.layers.{layer}." for layer in layers_of(self._config, pp)}
        return Counter(part for name, part in self._parts.items() if self._is_held(name, pp, layers))

    def _is_held(self, name: str, pp: int, layers: set[str]) -> bool:
        if name.startswith("model.layers."):
            return name[: name.index(".", len("model.layers.")) + 1] in layers
        return pp == (0 if name.startswith(EMBEDDING) else last_rank(self._config))

    def _shard(self, part: Part, place: Coordinates) -> int:
        """Elements of a rank's shard: over dp, cp, and ep unless it is an expert's (ENG-2).

        Dim 0 is cut if that divides, a stack's dim 1 else, dim 0 by ceiling last.
        """
        mesh, shape = self._config.mesh, part.shape
        shards, index = mesh.dp * mesh.cp, place.dp * mesh.cp + place.cp
        if not part.is_expert:
            shards, index = shards * mesh.ep, index * mesh.ep + place.ep
        elif len(shape) == 3 and shape[0] % shards and shape[1] % shards == 0:
            return prod(shape) // shards
        rows = -(-shape[0] // shards)
        return max(0, min(rows, shape[0] - index * rows)) * prod(shape[1:])

    def _used(self, part: Part) -> int:
        """Bytes of a number as forward and backward use it."""
        return self._master if part.is_wide else self._compute

    def _weight(self, part: Part) -> int:
        """A rank that shares nothing casts its masters once, into copies that stay."""
        copied = self._name == "master" and not self._sharded and not part.is_wide
        return self._master + (self._compute if copied else 0)

    def _gradient(self, part: Part) -> int:
        """Nothing is added to the gradient of a lone micro-batch, so it stays as it was made."""
        is_only = not self._sharded and self._config.mesh.pp == micro_batches(self._config) == 1
        return self._used(part) if is_only else self._master

    def _moments(self) -> int:
        """Bytes that the optimizer keeps for a parameter."""
        optimizer = self._config.optimizer
        if optimizer.kind == "adamw":
            first = 2 if self._config.precision.first_moment == "bf16" else self._master
            return first + self._master
        return self._master if optimizer.momentum else 0

    def _peak(self, pp: int) -> Peak:
        return fullest(self._config, pp, self._form, self._compute, self._gradients(pp), self._imbalance)

    def _gradients(self, pp: int) -> Gradients:
        """Gradients as they appear: of a micro-batch, and of the sums that they join."""
        again = self._compute != self._master and (not self._sharded or is_staged(self._config))
        sizes = {
            name: prod(part.shape) * (self._master if self._sharded else self._used(part))
            for name, part in self._parts.items()
        }
        sums = sum(prod(part.shape) * count for part, count in self._held[pp].items()) * self._master
        return Gradients(sizes, sums, again)
