"""The product of a projection; an operation so that the engine can put its weight gradient off (ENG-15)."""

from __future__ import annotations

import torch.nn.functional as F

from src.kernels.declaration import EAGER, Implementation

IMPLEMENTATIONS = (Implementation("linear", EAGER, F.linear, deterministic=(True, True), saves="x"),)
"""x·Wᵀ + b for x [..., in], weight [out, in], bias [out] or None."""
