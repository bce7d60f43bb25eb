"""Parameters and bytes of each rank, from shapes alone (PROJ-1); activations are an estimate."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from src.config import Config
from src.models.names import is_expert_stack, parameters
from src.models.schema import DeepseekV2Config, DenseConfig, GptOssConfig, MoeConfig, Qwen3MoeConfig
from src.trainer.parallel.layout import (
    Coordinates,
    coordinates,
    last_rank,
    micro_batches,
    split_layers,
    stage_count,
    stages_of,
    stages_per_rank,
)
from src.trainer.parallel.pipeline.schedule import peak_live
from src.validate_fp8 import is_product

Known = DeepseekV2Config | Qwen3MoeConfig | GptOssConfig | DenseConfig
"""Families of ours, whose activations are counted."""
COMPUTE_BYTES = {"fp64": 8, "fp32": 4, "master": 2, "split": 2, "bf16": 2}
"""Bytes of a number in forward and backward, by precision."""
MASTER_BYTES = {"fp64": 8, "fp32": 4, "master": 4, "split": 4, "bf16": 2}
"""Bytes of a stored parameter (both its halves), of a sum of its gradients and of a moment, by precision."""

FP8_BYTES = 2
"""Bytes of a weight in fp8: it is there in two forms, whole on each rank."""


@dataclass(frozen=True)
class RankMemory:
    """What one rank holds, in bytes but for `parameters`."""

    parameters: int
    """Parameters of its shards."""
    weights: int
    """Masters, and weights in fp8."""
    gradients: int
    optimizer: int
    unsharded: int
    """Gathered copies of sharded parameters in the compute dtype, and their gradients not yet reduced."""
    activations: int
    """Estimate of what the backward passes in flight still need."""

    @property
    def total(self) -> int:
        """All bytes together."""
        return self.weights + self.gradients + self.optimizer + self.unsharded + self.activations


def precision_name(config: Config, platform: str) -> str:
    """`precision.name` with `auto` settled: fp32 on a CPU, master on a GPU."""
    if config.precision.name != "auto":
        return config.precision.name
    return "fp32" if platform == "cpu" else "master"


def rank_memory(config: Config, rank: int, platform: str) -> RankMemory:
    """Bytes of one rank; parameters, gradients and moments are exact, the rest is the largest at one time."""
    place = coordinates(config.mesh, rank)
    precision = precision_name(config, platform)
    master, compute = MASTER_BYTES[precision], COMPUTE_BYTES[precision]
    local, gathered, alone = _count(config, place)
    cast = alone * compute if precision == "master" else 0
    return RankMemory(
        parameters=local,
        weights=local * master + FP8_BYTES * _in_fp8(config, place),
        gradients=local * (compute if is_summed_once(config) else master),
        optimizer=local * (master * moments(config) - (2 if config.precision.first_moment == "bf16" else 0)),
        unsharded=gathered * (compute + master) + cast,
        activations=activations(config, place, compute),
    )


def is_summed_once(config: Config) -> bool:
    """Whether a gradient stays as the only micro-batch made it: nothing is added to it, by no other rank."""
    mesh = config.mesh
    return mesh.pp == mesh.rep == mesh.dp == mesh.cp == mesh.ep == micro_batches(config) == 1


def moments(config: Config) -> int:
    """Tensors like a parameter that the optimizer keeps."""
    if config.optimizer.kind == "adamw":
        return 2
    return 1 if config.optimizer.momentum else 0


def stages_held(config: Config, pp: int) -> list[range]:
    """Global indices of the layers of each stage of a pipeline rank, in the order of the forward pass."""
    layers = split_layers(config.model.num_layers, stage_count(config))
    return [layers[stage] for stage in stages_of(config, pp)]


def layers_of(config: Config, pp: int) -> list[int]:
    """Global indices of the layers that a pipeline rank holds."""
    return [layer for stage in stages_held(config, pp) for layer in stage]


def _count(config: Config, place: Coordinates) -> tuple[int, int, int]:
    """Parameters of a rank: in its shards; and whole, those gathered for use and those held alone."""
    layers = {f"model.layers.{layer}." for layer in layers_of(config, place.pp)}
    local = gathered = alone = 0
    for name, shape in parameters(config.model).items():
        if not _is_held(config, name, place.pp, layers):
            continue
        is_expert = is_expert_stack(name)
        mine = (shape[0] // config.mesh.ep, *shape[1:]) if is_expert else shape
        shards, index = _shards(config, place, is_expert)
        local += _shard(mine, shards, index, is_expert)
        gathered += prod(mine) if shards > 1 else 0
        alone += prod(mine) if shards == 1 else 0
    return local, gathered, alone


def _in_fp8(config: Config, place: Coordinates) -> int:
    """Parameters of a rank whose products run in fp8."""
    layers = {f"model.layers.{layer}." for layer in layers_of(config, place.pp)}
    held = [
        prod(shape) // (config.mesh.ep if is_expert_stack(name) else 1)
        for name, shape in parameters(config.model).items()
        if is_product(name, shape, config.precision.fp8) and _is_held(config, name, place.pp, layers)
    ]
    return sum(held)


def _is_held(config: Config, name: str, pp: int, layers: set[str]) -> bool:
    if name.startswith("model.layers."):
        return name[: name.index(".", len("model.layers.")) + 1] in layers
    return pp == (0 if name.startswith("model.embed_tokens") else last_rank(config))


def _shards(config: Config, place: Coordinates, is_expert: bool) -> tuple[int, int]:
    """Shards of a parameter and the index of this rank's: over dp, cp, and ep unless it is an expert's."""
    mesh = config.mesh
    shards, index = mesh.dp * mesh.cp, place.dp * mesh.cp + place.cp
    return (shards, index) if is_expert else (shards * mesh.ep, index * mesh.ep + place.ep)


def _shard(shape: tuple[int, ...], shards: int, index: int, is_expert: bool) -> int:
    """Elements of one shard (ENG-2): dim 0 if that divides, a stack's dim 1 else, dim 0 by ceiling last."""
    if is_expert and len(shape) == 3 and shape[0] % shards and shape[1] % shards == 0:
        return prod(shape) // shards
    rows = -(-shape[0] // shards)
    return max(0, min(rows, shape[0] - index * rows)) * prod(shape[1:])


def activations(config: Config, place: Coordinates, compute: int) -> int:
    """Estimate: per live micro-batch and layer the residual stream, attention, and the rows of experts.

    Scores count in full, as the reference attention keeps them. With recomputation a layer keeps less, and
    one at a time has everything again. The last stage adds three tables of tokens times vocabulary: logits,
    their softmax and its gradient, in fp32 at least.
    """
    tokens = config.micro_batch_size * config.sequence_length // config.mesh.cp
    layers = max(len(stage) for stage in stages_held(config, place.pp))
    again = _layer_numbers(config) if config.recompute.name != "none" else 0
    size = (_live(config, place.pp) * layers * _kept_numbers(config) + again) * tokens * compute
    if place.pp == last_rank(config):
        size += 3 * tokens * (config.model.vocab_size or 0) * max(compute, 4)
    return size


def _live(config: Config, pp: int) -> int:
    """Activations, of a micro-batch in a stage each, that a pipeline rank keeps at one time (ENG-13)."""
    if config.mesh.pp == 1:
        return 1
    schedule, per_rank = config.pipeline.schedule, stages_per_rank(config)
    return peak_live(schedule, config.mesh.pp, per_rank, micro_batches(config), pp)


def _kept_numbers(config: Config) -> int:
    """Numbers that one token leaves in one layer until its backward (ENG-26)."""
    width = config.model.hidden_size
    if config.recompute.name == "full":
        return width
    if config.recompute.name == "stage":  # Input, tokens, residual; rows out, back, and home again.
        visited = config.model.top_k if isinstance(config.model, MoeConfig) else 1
        return (3 + 3 * visited) * width
    return _layer_numbers(config)


def _layer_numbers(config: Config) -> int:
    """Numbers that one token leaves in one layer; the dense layers are counted like the others."""
    model = config.model
    if not isinstance(model, Known):
        return 16 * model.hidden_size
    scores = 2 * model.num_heads * config.sequence_length
    return 8 * model.hidden_size + _head_numbers(model) + scores + _ffn_numbers(model)


def _ffn_numbers(model: Known) -> int:
    """Gate, up, their product and the output: of the dense FFN, or of each expert that a token visits."""
    if isinstance(model, DenseConfig):
        return 3 * model.intermediate_size + model.hidden_size
    shared = model.num_shared_experts if isinstance(model, DeepseekV2Config) else 0
    return (model.top_k + shared) * (3 * model.expert_size + model.hidden_size)


def _head_numbers(model: Known) -> int:
    """Queries, keys, values and what attention gives, of one token."""
    if not isinstance(model, DeepseekV2Config):
        return 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    key = model.qk_nope_head_dim + model.qk_rope_head_dim
    return model.num_heads * (2 * key + 2 * model.v_head_dim)
