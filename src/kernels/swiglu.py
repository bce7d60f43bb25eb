"""The gated activation between the two products of an FFN (OP-5)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from src.kernels.declaration import EAGER, Implementation


def swiglu(gate_up_N2F: Tensor) -> Tensor:
    """silu(gate)·up, [N,F]; the gate is the first half (FFN-1).

    GLU Variants Improve Transformer (arXiv 2002.05202, eq. 6).
    """
    gate_NF, up_NF = gate_up_N2F.chunk(2, -1)
    return F.silu(gate_NF) * up_NF


IMPLEMENTATIONS = (
    Implementation("swiglu", EAGER, swiglu, deterministic=(True, True), saves="gate_up, silu(gate)"),
)
