"""Router logits in full precision (OP-9)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from src.kernels.declaration import EAGER, Implementation
from src.kernels.dtypes import widen


def router_linear(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Logits [T,E] in fp32 at least, from wide copies of input and weight whatever the policy (MOD-4)."""
    return F.linear(widen(x_TD), widen(weight_ED))


IMPLEMENTATIONS = (
    Implementation("router_linear", EAGER, router_linear, deterministic=(True, True), saves="x, weight"),
)
