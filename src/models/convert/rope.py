"""Rotary parameters in Hugging Face's words (ATT-3)."""

from __future__ import annotations

from typing import Any

from src.models.schema import YarnConfig


def rope_parameters(theta: float, yarn: YarnConfig) -> dict[str, Any]:
    """The entry `rope_parameters` of a `config.json`; factors that are absent stay so."""
    if yarn.factor <= 1:
        return {"rope_type": "default", "rope_theta": theta}
    scales = {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_length,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "truncate": yarn.truncate,
    } | {key: value for key, value in scales.items() if value}
