"""Layers that families share: projections, norm, embedding, FFN, experts, attention, rotary angles.

Each module declares in `specs` how its own parameters start and are treated (`ParamSpec`); the constructor
only allocates, so building a model on any device costs no random numbers (ENG-9 fills it by global name).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from src.kernels.fp8 import Quantised
from src.kernels.registry import Ops
from src.models.protocol import Batch
from src.models.rotary import inverse_frequencies
from src.models.schema import YarnConfig

Init = Literal["normal", "ones", "zeros"]


@dataclass(frozen=True)
class ParamSpec:
    """How a parameter starts, and which rules it falls under; declared where it is made."""

    init: Init
    """Distribution of the first values."""
    std: float = 0.0
    """Standard deviation of `normal`."""
    expert: bool = False
    """One of the routed experts' stacks: divided over ep, sharded over (dp, cp) (ENG-2)."""
    decay: bool = True
    """Whether weight decay applies; not to gains and biases."""
    wide: bool = False
    """Used in the master's dtype under any precision, not in that of compute (MOD-4)."""


MATRIX = ParamSpec("normal", std=0.02)
GAIN = ParamSpec("ones", decay=False)
BIAS = ParamSpec("zeros", decay=False)
SINKS = ParamSpec("normal", std=0.02, decay=False)
ROUTER = ParamSpec("normal", std=0.02, wide=True)
ROUTER_BIAS = ParamSpec("normal", std=0.02, decay=False, wide=True)
EXPERTS = ParamSpec("normal", std=0.02, expert=True)
EXPERTS_BIAS = ParamSpec("zeros", expert=True, decay=False)


class Linear(nn.Module):
    """x·Wᵀ + b with weight [out, in]."""

    specs: ClassVar[dict[str, ParamSpec]] = {"weight": MATRIX, "bias": BIAS}

    def __init__(self, into: int, out: int, ops: Ops, bias: bool = False) -> None:
        super().__init__()
        self.ops = ops
        self.weight = nn.Parameter(torch.empty(out, into))
        self.bias = nn.Parameter(torch.empty(out)) if bias else None
        self.fp8: Quantised | None = None
        """The weight in fp8, which the engine lends where the product is to run in it."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out]."""
        product: Tensor
        if self.fp8 is None:
            product = self.ops.linear(x, self.weight, self.bias)
        else:
            product = self.ops.linear_fp8(x, self.weight, self.fp8, self.bias)
        return product

    def at_once(self, x: Tensor, weight: Tensor) -> Tensor:
        """As `forward` without bias, for a stand-in of the weight whose gradient nobody may put off."""
        if self.fp8 is None:
            return F.linear(x, weight)
        product: Tensor = self.ops.linear_fp8(x, weight, self.fp8, later=None)
        return product


class Embedding(nn.Module):
    """Rows of a table; no padding index, whose row would stay zero for ever (TRAP-1)."""

    specs: ClassVar[dict[str, ParamSpec]] = {"weight": MATRIX}

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [...] → [..., D]."""
        return F.embedding(ids, self.weight)


class RMSNorm(nn.Module):
    """Root mean square norm with a gain (MOD-6)."""

    specs: ClassVar[dict[str, ParamSpec]] = {"weight": GAIN}

    def __init__(self, width: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.eps = eps
        self.ops = ops
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., D]."""
        normed: Tensor = self.ops.rms_norm(x, self.weight, self.eps)[0]
        return normed

    def join(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and this sum."""
        normed, total = self.ops.rms_norm(x, self.weight, self.eps, residual)
        return normed, total


class SwiGLU(nn.Module):
    """down(silu(gate x)·up x): the dense FFN, and the shared experts as one (FFN-1, TRAP-3).

    Gate and up are weights of their own here, so the gated activation is written out: to join both products
    for the operation on stacked rows took a third longer on CPU.
    """

    def __init__(self, width: int, inner: int, ops: Ops) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner, ops)
        self.up_proj = Linear(width, inner, ops)
        self.down_proj = Linear(inner, width, ops)

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T,D] → [T,D]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))
        return out


class Experts(nn.Module):
    """Stacked routed experts (FFN-2): `gate_up` [E,2F,D] with the gate's rows first, `down` [E,D,F]."""

    specs: ClassVar[dict[str, ParamSpec]] = {"gate_up": EXPERTS, "down": EXPERTS}

    def __init__(self, experts: int, width: int, inner: int, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.down = nn.Parameter(torch.empty(experts, width, inner))
        self.fp8: tuple[Quantised, Quantised] | None = None
        """Both stacks in fp8, as in `Linear`."""

    def forward(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Rows grouped by local expert, their int32 counts → rows [R,D]; rows past the counts give zero."""
        offs_E = counts_E.cumsum(0, dtype=torch.int32)
        return self.by_down(self.ops.swiglu(self.by_gate_up(rows_RD, offs_E)), offs_E)

    def by_gate_up(self, rows_RD: Tensor, offs_E: Tensor) -> Tensor:
        """Rows up to the int32 ends times `gate_up`, [R,2F]."""
        out: Tensor
        if self.fp8 is None:
            out = self.ops.grouped_mm(rows_RD, self.gate_up, offs_E)
        else:
            out = self.ops.grouped_mm_fp8(rows_RD, self.gate_up, self.fp8[0], offs_E)
        return out

    def by_down(self, inner_RF: Tensor, offs_E: Tensor) -> Tensor:
        """Rows up to the int32 ends times `down`, [R,D]."""
        out: Tensor
        if self.fp8 is None:
            out = self.ops.grouped_mm(inner_RF, self.down, offs_E)
        else:
            out = self.ops.grouped_mm_fp8(inner_RF, self.down, self.fp8[1], offs_E)
        return out


class BiasedExperts(Experts):
    """Experts with a clamped SwiGLU, and with biases `gate_up_bias` [E,2F] and `down_bias` [E,D]."""

    specs: ClassVar[dict[str, ParamSpec]] = {
        **Experts.specs,
        "gate_up_bias": EXPERTS_BIAS,
        "down_bias": EXPERTS_BIAS,
    }

    def __init__(self, experts: int, width: int, inner: int, ops: Ops, limit: float, alpha: float) -> None:
        super().__init__(experts, width, inner, ops)
        self.limit, self.alpha = limit, alpha
        self.gate_up_bias = nn.Parameter(torch.empty(experts, 2 * inner))
        self.down_bias = nn.Parameter(torch.empty(experts, width))

    def forward(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """As `Experts.forward`; rows past the counts take no bias (ENG-19)."""
        offs_E = counts_E.cumsum(0, dtype=torch.int32)
        add = self.ops.expert_bias
        gate_up_R2F = add(self.by_gate_up(rows_RD, offs_E), self.gate_up_bias, offs_E)
        inner_RF = self.ops.swiglu(gate_up_R2F, limit=self.limit, alpha=self.alpha)
        out: Tensor = add(self.by_down(inner_RF, offs_E), self.down_bias, offs_E)
        return out


def attend(
    ops: Ops,
    batch: Batch,
    q_BSHC: Tensor,
    k_BSGC: Tensor,
    v_BSGU: Tensor,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """softmax(scale·q·kᵀ)·v over the keys of the same document up to each query, [B,S,H,U].

    Of G heads of keys and values, each serves H/G query heads that follow one another. `window` is the number
    of keys that a query sees, its own included (ATT-6); `sinks_H` holds a logit per head that joins the
    denominator (ATT-5).
    """
    if batch.context is not None:
        return batch.context.attend(
            q_BSHC, (k_BSGC, v_BSGU), None, (), scale, batch.documents_BS, window, sinks_H
        )
    asked = {"window": window, "sinks_H": sinks_H, "cu_seqlens": batch.cu_seqlens}
    options: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    o_BSHU, _ = ops.attention(q_BSHC, k_BSGC, v_BSGU, scale, batch.documents_BS, **options)
    out: Tensor = o_BSHU
    return out


class Rotary(nn.Module):
    """Angles of the rotary embedding for the positions of a batch, YaRN included (ATT-3)."""

    inverse_R: Tensor

    def __init__(self, width: int, theta: float, yarn: YarnConfig) -> None:
        super().__init__()
        self.frequencies, self.factor = inverse_frequencies(width, theta, yarn)
        self.register_buffer(
            "inverse_R", torch.tensor(self.frequencies, dtype=torch.float32), persistent=False
        )

    def reset_buffers(self, device: torch.device, dtype: torch.dtype) -> None:
        """Compute the frequencies anew; after meta initialisation they are garbage (TRAP-7)."""
        self.inverse_R = torch.tensor(self.frequencies, dtype=dtype, device=device)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """cos and sin [B,S,R/2] in the dtype of the frequencies, fp32 at least."""
        angles_BSR = batch.positions_BS[..., None] * self.inverse_R
        if self.factor == 1:
            return angles_BSR.cos(), angles_BSR.sin()
        return angles_BSR.cos() * self.factor, angles_BSR.sin() * self.factor


def param_specs(model: nn.Module) -> dict[str, ParamSpec]:
    """The spec of each of `model.named_parameters()`, from the module that made it."""
    return {
        f"{prefix}.{name}" if prefix else name: _spec(module, name)
        for prefix, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }


def _spec(module: nn.Module, name: str) -> ParamSpec:
    specs: Any = module.specs
    spec: ParamSpec = specs[name]
    return spec
