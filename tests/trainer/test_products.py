"""The products of a meta run are those that a real step makes (TUNE-1)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from src.config import Config, PipelineConfig, PrecisionConfig
from src.kernels.declaration import Device
from src.kernels.gemm_tuning import Product, Recorder
from src.kernels.registry import describe
from src.mesh_spec import parse
from src.models.schema import ModelConfig
from src.trainer import products
from src.trainer.backends.native import NativeBackend
from src.trainer.data.corpus import open_data
from src.trainer.data.loader import Loader
from src.trainer.products import products_of
from src.trainer.runtime import start
from tests.models import odd
from tests.trainer.small import small_config

WIDE = {"hidden_size": 44, "expert_size": 12}
"""Widths of whole 16 bytes, so that experts run by torch's grouped product, not by a loop."""
MODELS: dict[str, ModelConfig] = {
    "dense": odd.dense(),
    "deepseek_v2": odd.deepseek_v2(**WIDE),
    "qwen3_moe": odd.qwen3_moe(**WIDE),
    "gpt_oss": odd.gpt_oss(**WIDE),
}
HOPPER = Device("cuda", "sm90", packages={"triton": "3.6.0"})


def config_of(root: Path, model: str) -> Config:
    """Two micro-batches of two samples."""
    return small_config(root, model=MODELS[model], micro_batch_size=2, global_batch_size=4)


def recorded(config: Config) -> set[Product]:
    """Products of a real step on this CPU."""
    backend = NativeBackend.build(config, start(config))
    batch = Loader(config, open_data(config, None), 0, 1, 0).read(0)
    with Recorder() as recorder:
        backend.forward_backward(batch, torch.tensor(batch.target_tokens))
    return recorder.products


@pytest.mark.parametrize("model", MODELS)
def test_tune_1_the_meta_run_makes_the_products_of_a_real_one(tmp_path: Path, model: str) -> None:
    """TUNE-1: shapes, strides and dtypes of every product, forward and backward, in fp32."""
    config = config_of(tmp_path, model)
    found = products_of(config, describe(torch.device("cpu")))
    assert found == recorded(config)
    assert len(found) > 15


def test_tune_1_mutation_another_length_is_noticed(tmp_path: Path) -> None:
    """TUNE-1: the same comparison fails if the meta run takes one position less."""
    config = config_of(tmp_path, "dense")
    shorter = replace(config, sequence_length=config.sequence_length - 1)
    assert products_of(shorter, describe(torch.device("cpu"))) != recorded(config)


def test_tune_1_every_mesh_has_the_products_of_one_rank(tmp_path: Path) -> None:
    """TUNE-1: pipeline ranks together have those of the whole model; cp has fewer positions in each."""
    config, device = config_of(tmp_path, "deepseek_v2"), describe(torch.device("cpu"))
    whole = products_of(config, device)
    split = replace(config, mesh=replace(config.mesh, **parse("pp2ep2")), pipeline=PipelineConfig("1f1b"))
    assert products_of(split, device) == whole
    assert products_of(replace(config, mesh=replace(config.mesh, cp=2)), device).isdisjoint(whole)


@pytest.mark.parametrize("model", MODELS)
def test_tune_1_a_card_that_is_not_there(tmp_path: Path, model: str) -> None:
    """TUNE-1: a Hopper card's products in bf16, its head in chunks and its router in three terms."""
    config = replace(config_of(tmp_path, model), precision=PrecisionConfig("master"))
    found = products_of(config, HOPPER)
    assert {product.dtype for product in found} <= {"bfloat16", "float32"}
    rows = config.micro_batch_size * config.sequence_length
    assert any(product.factors[0][0][0] == rows for product in found)
    assert products.chosen(config, HOPPER).choices["linear_cross_entropy"].name == "triton"
