"""A weight in the two forms that products of 8 bits read (FP8-4)."""

from __future__ import annotations

import torch
from torch import Tensor

from src.kernels.declaration import EAGER, Implementation
from src.kernels.fp8 import E4M3, FP8_ARCHS, Quantised, cast, scale_of

BLOCK = 64


def quantise_weight(weight: Tensor, by_rows: bool, into: Quantised | None = None) -> Quantised:
    """A weight [out,in] or stack [E,out,in] in e4m3, without a graph, in the memory of `into` if it is given.

    By rows each form has scales of its own, over what its product sums over.
    """
    weight = weight.detach()
    turned = weight.transpose(-1, -2)
    rows_scale, columns_scale = _scales(weight, by_rows)
    rows, columns = cast(weight, rows_scale, E4M3), cast(turned, columns_scale, E4M3)
    return _written(into, Quantised(rows.contiguous(), columns.contiguous(), rows_scale, columns_scale))


def triton_quantise_weight(weight: Tensor, by_rows: bool, into: Quantised | None = None) -> Quantised:
    """`quantise_weight`, where one pass writes both forms."""
    from src.kernels.fused.quantise import quantise_kernel

    weight = weight.detach().contiguous()
    M, D = weight.shape[-2:]
    scales = _scales(weight, by_rows)
    if into is None:
        rows = torch.empty_like(weight, dtype=E4M3)
        into = Quantised(rows, rows.new_empty(*weight.shape[:-2], D, M), *scales)
    else:
        into = _written(into, Quantised(into.rows, into.columns, *scales))
    matrices = weight.shape[0] if weight.dim() == 3 else 1
    if weight.numel():
        quantise_kernel[(-(-D // BLOCK), -(-M // BLOCK), matrices)](
            weight, *into, M, D, BY_ROWS=by_rows, BLOCK_M=BLOCK, BLOCK_D=BLOCK
        )
    return into


def _scales(weight: Tensor, by_rows: bool) -> tuple[Tensor, Tensor]:
    """One tensor twice among the inputs of an autograd function breaks the graph in torch 2.13."""
    scale = scale_of(weight, E4M3, by_rows)
    return scale, scale_of(weight.transpose(-1, -2), E4M3, by_rows) if by_rows else scale.clone()


def _written(into: Quantised | None, new: Quantised) -> Quantised:
    if into is None:
        return new
    for old, values in zip(into, new, strict=True):
        if old is not values:
            old.copy_(values)
    return into


IMPLEMENTATIONS = (
    Implementation("quantise_weight", EAGER, quantise_weight, deterministic=(True, True), saves="nothing"),
    Implementation(
        "quantise_weight",
        "triton",
        triton_quantise_weight,
        source="triton",
        deterministic=(True, True),
        saves="nothing",
        devices=frozenset({"cuda"}),
        archs=FP8_ARCHS,
        dtypes=frozenset({torch.float32, torch.bfloat16}),
    ),
)
