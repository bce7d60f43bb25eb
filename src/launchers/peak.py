"""The fullest moment of a step on one rank: what waits, the layer that goes back, gradients so far.

Activations are most when the backward pass begins, gradients when it ends. Which moment holds most depends on
what a layer keeps and on the size of its weights, so the layers are walked from last to first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from src.config import Config
from src.kernels.chunk_rows import CHUNK_ROWS, FUSED_ROWS
from src.launchers.activations import Layer, Numbers, layer_of
from src.launchers.layer_form import Form
from src.trainer.parallel import layout
from src.trainer.parallel.pipeline.schedule import peak_live


@dataclass(frozen=True)
class Gradients:
    """Bytes of gradients as a rank's backward passes make them."""

    sizes: Mapping[str, int]
    """Parameter → bytes of the gradient of one micro-batch, for all parameters of the model."""
    sums: int
    """Those of all that the rank holds, once micro-batches are added up."""
    again: bool
    """Whether those of a later micro-batch stand beside the sums, in another dtype, until it is over."""

    def of(self, *prefixes: str) -> int:
        """Bytes of the parameters whose names begin so."""
        return sum(size for name, size in self.sizes.items() if name.startswith(prefixes))


@dataclass(frozen=True)
class Peak:
    """What is there at one moment, in bytes."""

    activations: int
    gradients: int

    @property
    def total(self) -> int:
        """Both."""
        return self.activations + self.gradients


@dataclass(frozen=True)
class _Stage:
    """One stage of a rank; bytes."""

    kept: Sequence[float]
    """Of each layer, first to last."""
    work: Sequence[float]
    """Of each layer going back, with what it computes again."""
    made: Sequence[int]
    """Gradients of each layer."""
    fused: Sequence[bool]
    """Whether all that a layer kept is there until its last gradient is made."""
    head: float
    """Kept by norm, head and loss; 0 but on the last stage."""
    head_work: float
    """At one time in the forward pass of the head, with what it keeps."""
    head_made: int
    """Gradients of norm and head."""

    @property
    def all(self) -> float:
        """Of one micro-batch that waits."""
        return sum(self.kept) + self.head


def fullest(
    config: Config, pp: int, form: Form, compute: int, gradients: Gradients, imbalance: float
) -> Peak:
    """The moment with most bytes of activations and gradients together, on a rank of the pipeline.

    Args:
        config: resolved and valid.
        pp: the pipeline rank.
        form: how layers are computed.
        compute: bytes of a number in forward and backward.
        gradients: of the rank.
        imbalance: rows of the fullest rank's experts over those of an even routing.
    """
    stages = [
        _stage(config, number, form, compute, gradients, imbalance) for number in layout.stages_of(config, pp)
    ]
    heaviest, live = max(stage.all for stage in stages), _live(config, pp)
    total = layout.micro_batches(config) * len(stages)
    moments = [m for stage in stages for m in _walk(stage, heaviest * (live - 1), 0, True)]
    if total > 1:
        waiting = heaviest * (min(live, total - 1) - 1)
        moments += [m for stage in stages for m in _walk(stage, waiting, gradients.sums, gradients.again)]
    return max(moments, key=lambda moment: moment.total)


def _walk(stage: _Stage, waiting: float, there: int, makes: bool) -> Iterator[Peak]:
    """The moments of one micro-batch: its head, its layers going back; `there` are gradients before it."""
    below, made = sum(stage.kept), 0
    yield Peak(int(waiting + below + stage.head_work), there)
    made += stage.head_made * makes
    yield Peak(int(waiting + below + stage.head), there + made)
    layers = zip(stage.kept, stage.work, stage.made, stage.fused, strict=True)
    for kept, work, new, fused in reversed(list(layers)):
        yield Peak(int(waiting + below + work), there + made + new * makes * fused)
        below, made = below - kept, made + new * makes
        yield Peak(int(waiting + below + work), there + made)


def _stage(
    config: Config, number: int, form: Form, compute: int, gradients: Gradients, imbalance: float
) -> _Stage:
    layers = layout.split_layers(config.model.num_layers, layout.stage_count(config))[number]
    tokens = config.micro_batch_size * config.sequence_length // config.mesh.cp
    counted = [layer_of(config, form, index, imbalance) for index in layers]
    name, D = config.recompute.name, config.model.hidden_size
    kept = [tokens * _kept(layer, name, form, D).bytes(compute) for layer in counted]
    work = [tokens * _work(layer, name, form).bytes(compute) for layer in counted]
    made = [gradients.of(f"model.layers.{index}.") for index in layers]
    is_last = number == layout.stage_count(config) - 1
    head = _head(config, form, tokens, compute) if is_last else (0.0, 0.0)
    fused = [layer.is_fused for layer in counted]
    return _Stage(kept, work, made, fused, *head, gradients.of("model.norm", "lm_head") if is_last else 0)


def _kept(layer: Layer, recompute: str, form: Form, width: int) -> Numbers:
    """Numbers that one token leaves in one layer until its backward (ENG-26)."""
    if recompute == "full":
        return Numbers(width)
    if recompute == "stage":
        return layer.between
    return layer.kept + layer.held if form.staged else layer.kept


def _work(layer: Layer, recompute: str, form: Form) -> Numbers:
    """Numbers of one token in one layer going back, beside those that waited."""
    if recompute == "full":
        return layer.work + layer.kept
    if recompute == "stage":
        return layer.again
    return layer.work


def _head(config: Config, form: Form, tokens: int, compute: int) -> tuple[float, float]:
    """Kept by last norm, head and loss, whose gradients are made at once; and at most in that forward pass.

    See `kernels/linear_cross_entropy.py`: logits of some rows at a time, the weight's gradient in fp32.
    """
    D, V, wide = config.model.hidden_size, config.model.vocab_size or 0, max(compute, 4)
    norm = tokens * D * (2 * compute if form.compiled else compute + 2 * wide)
    hidden = tokens * D * compute
    if form.plain_torch:
        rows, copies = min(CHUNK_ROWS, tokens), wide * (1 if compute == wide else 2)
        kept = norm + hidden + V * D * compute
        return kept, norm + hidden + V * (D * copies + rows * wide)
    kept = norm + hidden + V * D * 4
    return kept, kept + min(FUSED_ROWS, tokens) * V * compute


def _live(config: Config, pp: int) -> int:
    """Activations, of a micro-batch in a stage each, that a pipeline rank keeps at one time (ENG-13)."""
    if config.mesh.pp == 1:
        return 1
    schedule, per_rank = config.pipeline.schedule, layout.stages_per_rank(config)
    return peak_live(schedule, config.mesh.pp, per_rank, layout.micro_batches(config), pp)
