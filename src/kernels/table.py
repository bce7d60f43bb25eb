"""Operation → its implementations. A new file of an operation is entered here and nowhere else (REG-5)."""

from __future__ import annotations

from collections.abc import Mapping

from src.kernels import (
    accumulate,
    adamw,
    attention,
    attention_flash,
    attention_flash2,
    attention_flash4,
    attention_flex,
    combine,
    expert_bias,
    grad_norm,
    grouped_mm,
    grouped_mm_fp8,
    latent_heads,
    linear,
    linear_cross_entropy,
    linear_fp8,
    local_experts,
    permute,
    quantise_weight,
    rms_norm,
    rope,
    rotary_heads,
    route,
    router_linear,
    sort_by_expert,
    swiglu,
)
from src.kernels.declaration import Implementation

IMPLEMENTATIONS: Mapping[str, tuple[Implementation, ...]] = {
    "attention": (
        *attention.IMPLEMENTATIONS,
        *attention_flash.IMPLEMENTATIONS,
        *attention_flash2.IMPLEMENTATIONS,
        *attention_flash4.IMPLEMENTATIONS,
        *attention_flex.IMPLEMENTATIONS,
    ),
    "grouped_mm": grouped_mm.IMPLEMENTATIONS,
    "grouped_mm_fp8": grouped_mm_fp8.IMPLEMENTATIONS,
    "expert_bias": expert_bias.IMPLEMENTATIONS,
    "route": route.IMPLEMENTATIONS,
    "sort_by_expert": sort_by_expert.IMPLEMENTATIONS,
    "permute": permute.IMPLEMENTATIONS,
    "combine": combine.IMPLEMENTATIONS,
    "local_experts": local_experts.IMPLEMENTATIONS,
    "swiglu": swiglu.IMPLEMENTATIONS,
    "rms_norm": rms_norm.IMPLEMENTATIONS,
    "rope": rope.IMPLEMENTATIONS,
    "rotary_heads": rotary_heads.IMPLEMENTATIONS,
    "latent_heads": latent_heads.IMPLEMENTATIONS,
    "router_linear": router_linear.IMPLEMENTATIONS,
    "linear": linear.IMPLEMENTATIONS,
    "linear_fp8": linear_fp8.IMPLEMENTATIONS,
    "quantise_weight": quantise_weight.IMPLEMENTATIONS,
    "linear_cross_entropy": linear_cross_entropy.IMPLEMENTATIONS,
    "accumulate": accumulate.IMPLEMENTATIONS,
    "grad_norm": grad_norm.IMPLEMENTATIONS,
    "adamw": adamw.IMPLEMENTATIONS,
}
