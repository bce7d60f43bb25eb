"""Root mean square norm (OP-10)."""

from __future__ import annotations

import torch
from torch import Tensor

from src.kernels.declaration import EAGER, Implementation
from src.kernels.dtypes import widen


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x·w / √(mean x² + eps) over the last dimension, in fp32 at least, rounded once to the dtype of `x`.

    Root Mean Square Layer Normalization (arXiv 1910.07467, eq. 4), with eps inside the root.
    """
    wide = widen(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight_D).to(x.dtype)


IMPLEMENTATIONS = (
    Implementation("rms_norm", EAGER, rms_norm, deterministic=(True, True), saves="x, rstd, x/rms"),
)
