"""The dense twin of another model: its outer sizes, and an FFN so wide that both count as many (DENSE-1).

No torch here (CFG-18). Parameters and FLOPs are linear in the FFN width, so two counts give the width.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace

from src.models.counts import count, flops_per_token
from src.models.schema import DeepseekV2Config, DenseConfig, GptOssConfig, ModelConfig, Qwen3MoeConfig

MEASURES: dict[str, str] = {"active": "active parameters", "flops": "FLOPs per token"}
"""What two models can have equal, and its name."""
OUTER = ("hidden_size", "num_layers", "context", "rms_norm_eps", "tie_embeddings")
"""Keys that the twin takes as they are."""


def measured(config: ModelConfig, measure: str, sequence_length: int) -> int:
    """Active parameters, or training FLOPs per token with causal attention, of a model."""
    return count(config).active if measure == "active" else flops_per_token(config, sequence_length)


def twin(
    model: DenseConfig, other: ModelConfig, measure: str, sequence_length: int, given: Container[str]
) -> DenseConfig:
    """The dense model with the sizes of `other`, as near to it in `measure` as a whole FFN width allows.

    Args:
        model: keys that are not sizes come from here, and the vocabulary, which both then have.
        other: the model to follow, of a family in `ATTENTION`.
        measure: one of `MEASURES`.
        sequence_length: positions that FLOPs are counted at.
        given: keys of `model` that stay as they are.

    Returns:
        A copy with `match_target` set; `intermediate_size` is below 1 where everything else counts more.
    """
    other = replace(other, vocab_size=model.vocab_size)
    sizes = {key: getattr(other, key) for key in OUTER} | ATTENTION[other.family](other)
    found = replace(model, **{key: value for key, value in sizes.items() if key not in given})
    found.match_target = measured(other, measure, sequence_length)
    empty, one = (measured(replace(found, intermediate_size=k), measure, sequence_length) for k in (0, 1))
    found.intermediate_size = round((found.match_target - empty) / (one - empty))
    return found


def description(model: ModelConfig, sequence_length: int) -> dict[str, str | int] | None:
    """What a model was matched to, what that counts and what it counts itself; None for any other model."""
    if not isinstance(model, DenseConfig) or model.match is None or model.match_target is None:
        return None
    preset, _, measure = model.match.partition(":")
    found = measured(model, measure, sequence_length)
    return {"preset": preset, "measure": measure, "wanted": model.match_target, "found": found}


def words(match: dict[str, str | int]) -> str:
    """A description for a person."""
    wanted, found = int(match["wanted"]), int(match["found"])
    apart = found - wanted
    share = f"{apart:+,} ({100 * apart / wanted:+.3f} %)" if apart else "equal"
    return f"{MEASURES[str(match['measure'])]} of {match['preset']}: {wanted:,}; here {found:,}, {share}"


def _of_latent(other: DeepseekV2Config) -> dict[str, int | float]:
    """Every query head with keys of its own: the latent compresses those of as many.

    Heads are as wide as the values and fill the hidden size, as in Llama; where they cannot, as many heads as
    there, of the even width next to an equal share.
    """
    D, width = other.hidden_size, other.v_head_dim
    heads = D // width
    if D % width or width % 2:
        heads, width = other.num_heads, max(2, 2 * round(D / other.num_heads / 2))
    return {
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": width,
        "rope_theta": other.rope_theta,
    }


def _of_groups(other: Qwen3MoeConfig | GptOssConfig | DenseConfig) -> dict[str, int | float]:
    return {
        "num_heads": other.num_heads,
        "num_kv_heads": other.num_kv_heads,
        "head_dim": other.head_dim,
        "rope_theta": other.rope_theta,
    }


# Typed loosely: each function takes the config class of its own family.
ATTENTION: dict[str, Callable[..., dict[str, int | float]]] = {
    "deepseek_v2": _of_latent,
    "qwen3_moe": _of_groups,
    "gpt_oss": _of_groups,
    "dense": _of_groups,
}
"""Family → the heads of its twin; a family without a row has no twin."""
