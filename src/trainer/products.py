"""The products of a rank's step, from its model on the meta device: shapes and strides alone (TUNE-1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from src.config import Config
from src.kernels.declaration import EAGER, Device
from src.kernels.gemm_tuning import Product, Recorder
from src.kernels.registry import Ops, choose, implementations
from src.models.build import CausalLM, Holding, Stage, build, needs, param_specs
from src.models.dispatch import LocalDispatcher
from src.models.protocol import Batch
from src.trainer.parallel import layout
from src.trainer.parallel.masters import cast_for_compute
from src.trainer.parallel.precision import precision_of

INTEGERS = ("route", "sort_by_expert")
"""Operations that choose and count: the reference runs on the meta device, and makes no product."""
FUSED = "local_experts"
"""Stands for stages that run one by one here: it has no dense product of its own."""


def products_of(config: Config, device: Device) -> set[Product]:
    """Products of forward and backward of one micro-batch, of all ranks of the mesh together.

    Args:
        config: resolved and valid; the native backend's.
        device: one that need not exist.
    """
    ops = shapes_only(chosen(config, device))
    recorder = Recorder()
    for pp in range(config.mesh.pp):
        for stage in _stages(config, pp):
            with torch.device("meta"):
                model = build(config.model, Holding((stage,), range(config.model.num_experts)), ops)
            cast_for_compute(model, param_specs(model), precision_of(config, _kind(device)))
            _step(config, model, stage, ops, recorder, device)
    return recorder.products


def chosen(config: Config, device: Device) -> Ops:
    """The implementations that run on the device."""
    compute = precision_of(config, _kind(device)).compute
    return choose(config.kernels, device, compute, config.determinism, needs(config.model))


def _kind(device: Device) -> torch.device:
    return torch.device("cpu" if device.kind == "cpu" else "cuda")


def _stages(config: Config, pp: int) -> Iterator[Stage]:
    """Stages of a pipeline rank; with tied tables there is one that holds both, which is the whole model."""
    count = layout.stage_count(config)
    layers = layout.split_layers(config.model.num_layers, count)
    numbers = layout.stages_of(config, pp)
    if config.model.tie_embeddings:
        yield Stage(range(config.model.num_layers), first=True, last=True)
        return
    for number in numbers:
        yield Stage(layers[number], first=number == 0, last=number == count - 1)


def _step(
    config: Config, model: CausalLM[Any], stage: Stage, ops: Ops, recorder: Recorder, device: Device
) -> None:
    """Forward and backward of one micro-batch."""
    B, S = config.micro_batch_size, config.sequence_length // config.mesh.cp
    compute = precision_of(config, _kind(device)).compute
    with torch.device("meta"):
        model.reset_buffers(torch.device("meta"))
        ids = torch.zeros(B, S, dtype=torch.int64)
        hidden = torch.empty(B, S, config.model.hidden_size, dtype=compute, requires_grad=True)
        batch = Batch(ids, None, None, None, None)
        scale = torch.ones((), dtype=torch.promote_types(compute, torch.float32))
        with recorder:
            out = model(ids if stage.first else hidden, batch, LocalDispatcher(config.model.num_experts, ops))
            out = model.loss(out, ids, scale) if stage.last else out
            out.backward(torch.empty_like(out))


def shapes_only(ops: Ops) -> Ops:
    """The same operations, of which those without a dense product of torch's compute shapes alone."""
    stands: dict[str, Any] = {
        name: _shaped(shape)
        for name, shape in _SHAPES.items()
        if name == "grouped_mm" or ops.choices[name].name != EAGER  # The reference loops over experts.
    }
    stands |= {name: implementations()[name][EAGER].function for name in INTEGERS}
    choices = {**ops.choices, FUSED: replace(ops.choices[FUSED], name=EAGER)}
    return replace(ops, **stands, choices=choices)


def _shaped(shape: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    """An operation that makes empty tensors, whose gradients are as empty."""

    class Shaped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, options: dict[str, Any], *tensors: Any) -> Any:
            ctx.inputs = tensors
            return shape(*tensors, **options)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
            wanted = ctx.needs_input_grad[1:]
            found = (torch.empty_like(t) if w else None for t, w in zip(ctx.inputs, wanted, strict=True))
            return (None, *found)

    def call(*tensors: Any, **options: Any) -> Any:
        flat = [part for t in tensors for part in (t if isinstance(t, tuple) else (t,))]
        made = Shaped.apply(options, *flat)  # type: ignore[no-untyped-call]
        return made if len(made) > 1 else made[0]

    return call


def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(*q.shape[:3], v.shape[3]), lse


def _latent(q: Tensor, kv: Tensor, k: Tensor, *angles: Tensor) -> tuple[Tensor, ...]:
    nope = q.shape[-1] - k.shape[-1]
    return q.new_empty(q.shape), q.new_empty(q.shape), kv.new_empty(*kv.shape[:3], kv.shape[-1] - nope)


_SHAPES: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "attention": _attention,
    "latent_heads": _latent,
    "rotary_heads": lambda q, k, *rest, **options: (q.new_empty(q.shape), k.new_empty(k.shape)),
    "grouped_mm": lambda x, w, offs, *rest: (x.new_empty(x.shape[0], w.shape[1]),),
    "expert_bias": lambda x, *rest: (x.new_empty(x.shape),),
    "swiglu": lambda x, **options: (x.new_empty(x.shape[0], x.shape[1] // 2),),
    "rope": lambda x, *rest, **options: (x.new_empty(x.shape),),
    "rms_norm": lambda x, *rest: (x.new_empty(x.shape),),
    "permute": lambda x, rows, *rest: (x.new_empty(rows.shape[0], x.shape[1]),),
    "combine": lambda y, rows, weights, residual: (residual.new_empty(residual.shape),),
}
"""Operation → shapes of what it returns."""
