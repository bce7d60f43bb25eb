"""The estimate of a step's fullest moment against what torch allocates for one on a CPU (PROJ-2)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from src.config import (
    Config,
    KernelsConfig,
    OptimizerConfig,
    PipelineConfig,
    PrecisionConfig,
    RecomputeConfig,
)
from src.launchers.memory import rank_memory
from src.models.schema import ModelConfig
from src.trainer.runtime import start
from tests.models import odd
from tests.trainer.memory_use import use_of
from tests.trainer.small import small_config

MODELS: dict[str, ModelConfig] = {
    "dense": odd.dense(),
    "deepseek_v2": odd.deepseek_v2(),
    "qwen3_moe": odd.qwen3_moe(),
    "gpt_oss": odd.gpt_oss(),
}
FORMS: dict[str, dict[str, object]] = {
    "one micro-batch": {"global_batch_size": 3},
    "two": {"global_batch_size": 6},
    "staged": {"pipeline": PipelineConfig(program="staged")},
    "recompute=stage": {"recompute": RecomputeConfig("stage")},
    "recompute=full": {"recompute": RecomputeConfig("full")},
    "scores": {"kernels": KernelsConfig("eager")},
    "master": {"precision": PrecisionConfig("master")},
}


def config_of(root: Path, model: str, form: str) -> Config:
    """Samples of 160 positions, so that activations are most of what there is."""
    base = small_config(
        root, model=MODELS[model], optimizer=OptimizerConfig(lr=1e-3), sequence_length=160,
        micro_batch_size=3, global_batch_size=3,
    )  # fmt: skip
    return replace(base, **FORMS[form])  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_proj_2_the_fullest_moment_of_a_step(tmp_path: Path, model: str) -> None:
    """PROJ-2: within 10 % of what is allocated beside the states, 20 % where layers go forward twice."""
    for form in FORMS:
        config = config_of(tmp_path, model, form)
        use, plan = use_of(config, start(config)), rank_memory(config, 0, "cpu")
        assert (plan.weights, plan.gradients, plan.optimizer) == (use.weights, use.gradients, use.optimizer)
        beside = plan.total - plan.weights - plan.optimizer
        limit = 0.20 if "recompute" in form else 0.10
        assert abs(beside / use.beside - 1) < limit, (form, beside, use.beside, beside / use.beside - 1)
