"""How a run computes its layers, as far as what they keep depends on it; no torch here."""

from __future__ import annotations

from dataclasses import dataclass

from src.code_identity import package_version
from src.config import Config
from src.models.schema import DeepseekV2Config, Qwen3MoeConfig
from src.trainer.data.synthetic import is_dense
from src.trainer.parallel.layout import is_sharded, is_staged


@dataclass(frozen=True)
class Form:
    """The form of a rank's layers."""

    compiled: bool = False
    """One graph a layer: it keeps what its products read, and computes the rest again."""
    fused: bool = False
    """Stages 2 to 5 are one operation, which of the experts keeps gate and up only."""
    plain_torch: bool = False
    """Heads and gated activations are plain torch, not kernels."""
    scores: bool = False
    """Attention keeps the probabilities of every pair of positions."""
    packed: bool = False
    """A mask keeps the documents of a sample apart."""
    staged: bool = False
    """Stages of a layer have a graph each, and hold what stands between them."""
    on_cpu: bool = False
    """Kernels are those of a CPU."""
    length: int = 0
    """Positions of a sample."""


def form_of(config: Config, platform: str) -> Form:
    """What `auto` chooses on a Hopper card, or on a CPU; packages are those of this machine."""
    on_cpu, staged, sharded = platform == "cpu", is_staged(config), is_sharded(config.mesh)
    wanted, auto = config.backend.compile, not on_cpu and not sharded
    plain_torch = on_cpu or config.kernels.name == "eager"
    return Form(
        compiled=auto if wanted == "auto" else wanted != "none",
        fused=not (staged or sharded or plain_torch) and _fuses(config),
        plain_torch=plain_torch,
        scores=_keeps_scores(config),
        packed=not is_dense(config),
        staged=staged,
        on_cpu=on_cpu,
        length=config.sequence_length,
    )


def _fuses(config: Config) -> bool:
    """Whether QuACK computes the experts; it takes no biases and bf16 alone."""
    wanted = config.kernels.local_experts
    if wanted is not None:
        return wanted != "eager"
    able = isinstance(config.model, DeepseekV2Config | Qwen3MoeConfig)
    in_bf16 = config.precision.name not in ("fp32", "fp64")
    is_there = package_version("quack-kernels") is not None
    return able and in_bf16 and is_there and config.kernels.name != "triton"


def _keeps_scores(config: Config) -> bool:
    """The reference does; a ring's blocks and other kernels make them anew."""
    if config.mesh.cp > 1 or config.backend.name == "transformers":
        return False
    return (config.kernels.attention or config.kernels.name) == "eager" or config.precision.name == "fp64"
