"""What a layer keeps for its backward pass, in numbers a token, tensor by tensor; no torch here (PROJ-2).

The tensors are those that autograd saves of a layer, or torch 2.13's partitioner of a compiled one. Tests
hold the sums to allocations on a CPU and to peaks on an H200 (`tests/trainer/test_memory.py`,
`tests/config/test_peaks.py`). Letters as in the models: D model width, F inner width, H and G heads, C and U
widths of heads, E experts, K top-k, S sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from src.config import Config
from src.launchers.layer_form import Form
from src.models.names import is_moe_layer, window_of
from src.models.schema import DeepseekV2Config, GptOssConfig, Qwen3MoeConfig

INDICES, TRAVELLING = 6, 16
"""4-byte numbers of a token and an expert it visits: ids, weights and the order of rows; more where rows
travel, whose orders are 8-byte (`parallel/expert.py`)."""
UNKNOWN = 16
"""Model widths that a token leaves in a layer nobody counted; a dense one with F = 4·D keeps about 16."""


@dataclass(frozen=True)
class Numbers:
    """How many numbers, in the dtype of compute and in fp32 at least."""

    compute: float = 0
    wide: float = 0
    cast: float = 0
    """Copies in fp32, none where compute has as many bits."""

    def __add__(self, other: Numbers) -> Numbers:
        return Numbers(self.compute + other.compute, self.wide + other.wide, self.cast + other.cast)

    def less(self, other: Numbers) -> Numbers:
        """What is left without the other; a part may be negative."""
        return self + Numbers(-other.compute, -other.wide, -other.cast)

    def bytes(self, size: int) -> float:
        """Bytes, where a number in the dtype of compute has `size`."""
        return self.compute * size + self.wide * max(size, 4) + self.cast * (4 if size < 4 else 0)


NONE = Numbers()


@dataclass(frozen=True)
class Layer:
    """One token in one layer."""

    attend: Numbers
    """Kept by stage 1: norms, attention, router, shared experts."""
    experts: Numbers
    """Kept by stages 2 to 5, or by the dense FFN."""
    between: Numbers
    """Kept instead where stages 1 and 3 are computed again: what stands between stages."""
    held: Numbers
    """Kept beside where stages have a graph each, which hold what they take and give."""
    work: Numbers
    """Beside these at the start of its backward pass."""
    again: Numbers
    """Beside `between` at one time in its backward pass, where stages 1 and 3 are computed again."""
    is_fused: bool = False
    """All that it kept is there until its last gradient is made."""

    @property
    def kept(self) -> Numbers:
        """All of stages 1 to 5."""
        return self.attend + self.experts


def layer_of(config: Config, form: Form, index: int, imbalance: float = 1.0) -> Layer:
    """The layer with this global index; experts get `imbalance` times the rows of an even routing."""
    model: Any = config.model  # Its fields differ between families.
    D = model.hidden_size
    if model.family not in _ATTENTION:
        return Layer(Numbers(UNKNOWN * D), NONE, Numbers(D), NONE, Numbers(4 * D), NONE)
    attend = _norm(D, form) + _norm(D, form) + _ATTENTION[model.family](model, form)
    attend += _pairs(config, form, index)
    if is_moe_layer(model, index):
        return _with_experts(config, form, attend, imbalance)
    F = model.intermediate_size
    ffn, between = _gated(F, form), Numbers(3 * D)
    work = _work(model, form, Numbers(D + 2 * F), ffn)
    return Layer(attend, ffn, between, Numbers(D), work, _again(work, ffn, attend, Numbers(D), D))


def _with_experts(config: Config, form: Form, attend: Numbers, imbalance: float) -> Layer:
    """The dispatched rows, gate and up, their product, and the rows that come home."""
    model: Any = config.model
    D, F, K = model.hidden_size, model.expert_size, model.top_k
    rows, shared = K * imbalance, getattr(model, "num_shared_experts", 0)
    indices = (TRAVELLING if config.mesh.ep > 1 else INDICES) * K
    attend += Numbers(wide=model.num_experts + indices, cast=D if form.plain_torch else 0)
    attend += _gated(shared * F, form)
    if form.fused:
        work = Numbers(4 * D + rows * (D + 2 * F))
        return Layer(attend, Numbers(rows * 2 * F), NONE, NONE, work, NONE, is_fused=True)
    inner = Numbers(rows * (2 + _passes(model, form)) * F)
    experts = inner + Numbers((rows + K) * D)
    residual, travelled = Numbers(D if shared else 0), Numbers(K * D + 2 * rows * D)
    work = _work(model, form, Numbers(2 * rows * D), experts)
    return Layer(
        attend,
        experts,
        between=residual + travelled + Numbers(D),
        held=residual + Numbers(rows * D),
        work=work,
        again=_again(work, inner, attend, travelled, D),
    )


def _again(work: Numbers, inner: Numbers, attend: Numbers, gone: Numbers, width: int) -> Numbers:
    """Stage 3 comes first; when stage 1 is computed again, what had travelled between them is gone.

    Going back through attention takes about four model widths more: gradients of heads and of both norms.
    """
    return _larger(work + inner, attend.less(gone) + Numbers(4 * width))


def _work(model: Any, form: Form, ffn: Numbers, freed: Numbers) -> Numbers:
    """Of stages 2 to 5; or of attention, when what they kept is gone: two gradients of its scores."""
    if not form.scores:
        return ffn
    return _larger(ffn, Numbers(wide=2 * model.num_heads * form.length).less(freed))


def _larger(one: Numbers, other: Numbers) -> Numbers:
    return max(one, other, key=lambda numbers: numbers.bytes(4))


def _passes(model: Any, form: Form) -> int:
    """Widths F that the activation of stacked experts keeps besides gate and up, its result included."""
    if form.compiled or not form.plain_torch:
        return 1
    return 5 if isinstance(model, GptOssConfig) else 2  # The clamped kind has five factors.


def _norm(width: int, form: Form) -> Numbers:
    """Input and output; in plain torch a wide copy of the input, that over its rms, and the output."""
    return Numbers(2 * width) if form.compiled else Numbers(width, 2 * width)


def _gated(width: int, form: Form) -> Numbers:
    """Gate, up and their product of an FFN of plain layers; the activated gate where it is not compiled."""
    return Numbers((3 if form.compiled else 4) * width)


def _grouped(model: Any, form: Form) -> Numbers:
    """Queries, keys, values and what attention gives; queries and keys once more where they are normed."""
    heads, groups = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    found = Numbers(2 * (heads + groups), model.num_heads + model.head_dim)
    if isinstance(model, Qwen3MoeConfig):
        in_passes = form.plain_torch and not form.compiled
        found += Numbers(wide=2 * (heads + groups)) if in_passes else Numbers(heads + groups)
    return found


def _latent(model: DeepseekV2Config, form: Form) -> Numbers:
    """Queries, keys, values and output per head, and the latents; torch's CPU kernel pads values to keys."""
    key, value = model.qk_nope_head_dim + model.qk_rope_head_dim, model.v_head_dim
    widths = 2 * key + 2 * value
    if form.on_cpu and not form.scores and value < key:
        widths = 4 * key + value
    latents = _norm(model.kv_lora_rank, form)
    if model.q_lora_rank is not None:
        latents += _norm(model.q_lora_rank, form)
    rope = Numbers(model.qk_rope_head_dim, model.qk_rope_head_dim)
    return latents + rope + Numbers(model.num_heads * widths, model.num_heads)


def _pairs(config: Config, form: Form, index: int) -> Numbers:
    """What grows with the square of the length: probabilities, and a mask for each sample or for all."""
    model: Any = config.model
    length = config.sequence_length // config.mesh.cp
    found = Numbers(wide=model.num_heads * config.sequence_length if form.scores else 0)
    if form.scores and hasattr(model, "num_kv_heads"):  # A copy of keys and values for each query head.
        found += Numbers(wide=2 * (model.num_heads - model.num_kv_heads) * model.head_dim)
    if form.scores or config.mesh.cp > 1:
        return found
    if form.packed:
        return found + Numbers(length)
    return found + Numbers(length / config.micro_batch_size if window_of(model, index) is not None else 0)


_ATTENTION: dict[str, Callable[[Any, Form], Numbers]] = {
    "deepseek_v2": _latent,
    "qwen3_moe": _grouped,
    "gpt_oss": _grouped,
    "dense": _grouped,
}
"""Family → what its attention keeps."""
