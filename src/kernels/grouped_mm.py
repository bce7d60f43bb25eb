"""Product of each expert's rows with its own weight (OP-1).

Both implementations share one autograd rule. Under `torch.compile` the products are opaque custom operations:
the loop would break the graph, and torch's fake rule for `grouped_mm` takes bf16 only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from src.kernels.declaration import EAGER, HOPPER_ON, Implementation
from src.kernels.grouped_quack import PACKAGES, quack_outer, quack_rows
from src.kernels.later import Later
from src.kernels.opaque import opaque
from src.kernels.tail import zero_tail

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def loop_rows(x_ND: Tensor, w_EMD: Tensor, offs_E: Tensor) -> Tensor:
    """y[a:b] = x[a:b] @ w[e].T for each expert's rows; rows from `offs_E[-1]` on are zero."""
    y_NM = x_ND.new_zeros(x_ND.shape[0], w_EMD.shape[1])
    for expert, (start, end) in enumerate(_spans(offs_E, x_ND.shape[0])):
        torch.mm(x_ND[start:end], w_EMD[expert].T, out=y_NM[start:end])
    return y_NM


def loop_outer(y_NM: Tensor, x_ND: Tensor, offs_E: Tensor) -> Tensor:
    """w[e] = y[a:b].T @ x[a:b], [E,M,D]; an expert without rows gets zeros."""
    w_EMD = x_ND.new_zeros(offs_E.shape[0], y_NM.shape[1], x_ND.shape[1])
    for expert, (start, end) in enumerate(_spans(offs_E, x_ND.shape[0])):
        torch.mm(y_NM[start:end].T, x_ND[start:end], out=w_EMD[expert])
    return w_EMD


def library_rows(x_ND: Tensor, w_EMD: Tensor, offs_E: Tensor) -> Tensor:
    """`loop_rows` by torch's product, which leaves rows past the last offset unset (pytorch #193633)."""
    end = _spans(offs_E, x_ND.shape[0])[-1][1]
    y_NM = F.grouped_mm(x_ND, w_EMD.transpose(1, 2), offs=offs_E)
    if end < x_ND.shape[0]:
        y_NM[end:] = 0
    return y_NM


def library_rows_cuda(x_ND: Tensor, w_EMD: Tensor, offs_E: Tensor) -> Tensor:
    """`library_rows` without a look at the offsets: a kernel that mostly does nothing zeroes the tail."""
    y_NM = F.grouped_mm(x_ND, w_EMD.transpose(1, 2), offs=offs_E)
    zero_tail(y_NM, offs_E)
    return y_NM


def library_outer(y_NM: Tensor, x_ND: Tensor, offs_E: Tensor) -> Tensor:
    """`loop_outer` by torch's grouped product, which takes no empty rows on a GPU."""
    if not y_NM.shape[0]:
        return x_ND.new_zeros(offs_E.shape[0], y_NM.shape[1], x_ND.shape[1])
    return F.grouped_mm(y_NM.T, x_ND, offs=offs_E)


def _spans(offs_E: Tensor, rows: int) -> list[tuple[int, int]]:
    ends = offs_E.tolist()
    if ends[-1] > rows:
        raise ValueError(
            f"the last offset is {ends[-1]} but there are {rows} rows: offsets and rows must agree"
        )
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _rows_shape(x_ND: Tensor, w_EMD: Tensor, offs_E: Tensor) -> Tensor:
    return x_ND.new_empty(x_ND.shape[0], w_EMD.shape[1])


def _outer_shape(y_NM: Tensor, x_ND: Tensor, offs_E: Tensor) -> Tensor:
    return x_ND.new_empty(offs_E.shape[0], y_NM.shape[1], x_ND.shape[1])


def _differentiable(name: str, rows: Product, outer: Product) -> Callable[..., Tensor]:
    """`(x_ND, w_EMD, offs_E int32 ends) -> y_NM`, with dx by rows and dw by outer products.

    `later` may take over the weight's gradient.
    """
    schema = "(Tensor a, Tensor b, Tensor offs) -> Tensor"
    rows = opaque(f"{name}_rows", schema, rows, _rows_shape)
    outer = opaque(f"{name}_outer", schema, outer, _outer_shape)

    class GroupedMm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x_ND: Tensor, w_EMD: Tensor, offs_E: Tensor, later: Later | None) -> Tensor:
            ctx.save_for_backward(x_ND, w_EMD, offs_E)
            ctx.later = later
            return rows(x_ND, w_EMD, offs_E)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
            x_ND, w_EMD, offs_E = ctx.saved_tensors
            dy_NM = grads[0].contiguous()  # A gradient of stride 0, as from `.sum()`, raises in the library.
            dw_EMD = None
            if ctx.later is None or not ctx.later(w_EMD, lambda: outer(dy_NM, x_ND, offs_E)):
                dw_EMD = outer(dy_NM, x_ND, offs_E)
            return rows(dy_NM, w_EMD.transpose(1, 2), offs_E), dw_EMD, None, None

    def grouped_mm(x_ND: Tensor, w_EMD: Tensor, offs_E: Tensor, later: Later | None = None) -> Tensor:
        out: Tensor = GroupedMm.apply(x_ND, w_EMD, offs_E, later)  # type: ignore[no-untyped-call]
        return out

    return grouped_mm


def aligned(widths: Mapping[str, int], dtype: torch.dtype) -> str | None:
    """The library's products want rows of whole 16 bytes; forward alone would pass in bf16."""
    bad = [f"{name} {width}" for name, width in widths.items() if width * dtype.itemsize % 16]
    return f"needs rows of a multiple of 16 bytes, which {', '.join(bad)} in {dtype} are not" if bad else None


grouped_mm = _differentiable("grouped_mm_loop", loop_rows, loop_outer)
torch_grouped_mm = _differentiable("grouped_mm_library", library_rows, library_outer)
torch_grouped_mm_cuda = _differentiable("grouped_mm_cuda", library_rows_cuda, library_outer)
quack_grouped_mm = _differentiable("grouped_mm_quack", quack_rows, quack_outer)

IMPLEMENTATIONS = (
    Implementation("grouped_mm", EAGER, grouped_mm, deterministic=(True, True), saves="x, weight"),
    Implementation(
        "grouped_mm",
        "torch_grouped_mm",
        torch_grouped_mm,
        source="library",
        deterministic=(True, True),
        saves="x, weight",
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        shapes=aligned,
    ),
    Implementation(
        "grouped_mm",
        "torch_grouped_mm_cuda",
        torch_grouped_mm_cuda,
        source="library",
        deterministic=(True, True),
        saves="x, weight",
        devices=frozenset({"cuda"}),
        archs=HOPPER_ON,  # Older ones loop, with a look at the offsets (pytorch #186620).
        dtypes=frozenset({torch.bfloat16}),
        shapes=aligned,
    ),
    Implementation(
        "grouped_mm",
        "quack",
        quack_grouped_mm,
        source="library",
        deterministic=(True, True),
        saves="x, weight",
        devices=frozenset({"cuda"}),
        archs=frozenset({"sm90"}),
        dtypes=frozenset({torch.bfloat16}),
        packages=PACKAGES,
        shapes=aligned,
    ),
)
