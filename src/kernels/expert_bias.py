"""A bias of each expert on its own rows (OP-12)."""

from __future__ import annotations

import torch
from torch import Tensor

from src.kernels.declaration import EAGER, Implementation


def expert_bias(rows_RM: Tensor, bias_EM: Tensor, offs_E: Tensor) -> Tensor:
    """rows[a:b] + bias[e] for each expert's rows; `offs_E` int32 are their ends. Returns [R,M].

    Rows from `offs_E[-1]` on are zero, whatever they held, and give no gradient (ENG-19). Rows choose their
    bias by a product with a matrix of ones and zeros, so that the bias's gradient is the transposed product:
    sums in one order, without atomics, and without a look at the offsets.
    """
    places_R1 = torch.arange(rows_RM.shape[0], dtype=offs_E.dtype, device=offs_E.device)[:, None]
    starts_E = torch.cat((offs_E.new_zeros(1), offs_E[:-1]))
    held_RE = (places_R1 >= starts_E) & (places_R1 < offs_E)
    sums_RM = torch.addmm(rows_RM, held_RE.to(bias_EM.dtype), bias_EM)
    return torch.where(places_R1 < offs_E[-1:], sums_RM, 0)


IMPLEMENTATIONS = (
    Implementation(
        "expert_bias", EAGER, expert_bias, deterministic=(True, True), saves="who holds which row"
    ),
)
