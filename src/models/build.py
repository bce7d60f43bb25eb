"""From a config to its model: the class of the family, by import path."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from src.kernels.declaration import Need
from src.kernels.registry import Ops
from src.models.causal_lm import CausalLM
from src.models.layers import ParamSpec, param_specs
from src.models.schema import ModelConfig
from src.models.stage import Holding, Stage, alone, whole

FAMILIES = {
    "deepseek_v2": "src.models.deepseek_v2:DeepseekV2",
    "qwen3_moe": "src.models.qwen3_moe:Qwen3Moe",
    "gpt_oss": "src.models.gpt_oss:GptOss",
    "dense": "src.models.dense:Dense",
}


def build(config: ModelConfig, holding: Holding, ops: Ops) -> CausalLM[Any]:
    """What a rank holds of the model, its parameters allocated and not filled; works under a meta device.

    Raises `ValueError` if `vocab_size` is still null.
    """
    return _family(config)(config, holding, ops)


def needs(config: ModelConfig) -> dict[str, Need]:
    """What the model asks of each operation, for `registry.resolve`."""
    return _family(config).needs(config)


def _family(config: ModelConfig) -> type[CausalLM[Any]]:
    module, name = FAMILIES[config.family].split(":")
    family: type[CausalLM[Any]] = getattr(import_module(module), name)
    return family


__all__ = [
    "FAMILIES",
    "CausalLM",
    "Holding",
    "ParamSpec",
    "Stage",
    "alone",
    "build",
    "needs",
    "param_specs",
    "whole",
]
