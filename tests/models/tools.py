"""Models, batches and weights for tests of models and kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from src.config import DeterminismConfig, KernelsConfig
from src.kernels.registry import Ops, resolve
from src.models.build import CausalLM, build, needs, param_specs, whole
from src.models.dispatch import LocalDispatcher
from src.models.names import Entry, canonical
from src.models.protocol import Balances, Batch
from src.models.schema import ModelConfig

CPU = torch.device("cpu")


def operations(
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    kernels: str = "eager",
    device: torch.device = CPU,
) -> Ops:
    """The operations that a run of this model on packed samples would use."""
    return resolve(KernelsConfig(name=kernels), device, dtype, DeterminismConfig(), needs(config))


def make(
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    kernels: str = "eager",
    device: str = "cpu",
) -> tuple[CausalLM[Any], LocalDispatcher]:
    """A whole model with weights N(0, 1/fan_in), gains and biases near their start, and its dispatcher."""
    ops = operations(config, dtype, kernels, torch.device(device))
    model = build(config, whole(config), ops).to(device, dtype)
    model.reset_buffers(torch.device(device))
    generator = torch.Generator().manual_seed(7)
    specs = param_specs(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            fan_in = parameter.shape[-1]
            start = 1.0 if specs[name].init == "ones" else 0.0
            scale = fan_in**-0.5 if specs[name].init == "normal" else 0.1
            parameter.copy_(start + scale * draw)
    return model, LocalDispatcher(config.num_experts, ops)


def batch(
    length: int,
    samples: int = 2,
    documents: list[int] | None = None,
    balances: Balances | None = None,
    device: str = "cpu",
) -> Batch:
    """Samples of `length` positions; `documents` are lengths that cut the flattened batch into segments."""
    if documents is None:
        positions = torch.arange(length, device=device).expand(samples, length)
        return Batch(positions, None, None, None, balances)
    assert sum(documents) == samples * length
    starts = torch.tensor([0, *documents]).cumsum(0).int()
    ids = torch.repeat_interleave(torch.arange(len(documents), dtype=torch.int32), torch.tensor(documents))
    positions = torch.cat([torch.arange(n) for n in documents])
    shape = (samples, length)
    return Batch(positions.view(shape), starts, ids.view(shape), None, balances)


def view(entry: Entry, tensors: dict[str, Tensor]) -> Tensor:
    """The part of a stacked tensor that a canonical entry names."""
    tensor = tensors[entry.parameter]
    tensor = tensor if entry.expert is None else tensor[entry.expert]
    tensor = tensor.T if entry.transposed else tensor
    return tensor if entry.rows is None else tensor[entry.rows]


def by_canonical_name(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors shaped like the parameters, under the names of checkpoints."""
    return {name: view(entry, tensors).contiguous() for name, entry in canonical(config).items()}


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """The gradient of every parameter; a missing one is an error."""
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert not missing, f"no gradient: {missing}"
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative(x: Tensor, reference: Tensor) -> float:
    """‖x − ref‖₂ / ‖ref‖₂; infinite where either holds a NaN or the reference is all zero (T-2, NUM-2)."""
    x, reference = x.double(), reference.double()
    error = float((x - reference).norm() / reference.norm())
    return error if error == error else float("inf")
