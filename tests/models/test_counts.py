"""MOD-2: the two functions equal the published tables, the shapes of a meta-device build, and each other."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from src.compose import compose
from src.models.build import build, whole
from src.models.counts import count, flops_per_token, moe_layers
from src.models.names import parameters
from src.models.schema import DeepseekV2Config
from tests.models import odd
from tests.models.tools import operations

# (total, active, N_mm); GF per token by S (causal, full); (dense layer, MoE layer: experts, rest, V·D)
TABLE = {
    "deepseek_v2/lite": (
        (15_706_484_224, 2_661_150_208, 2_451_308_544),
        {2048: (15.56, 16.41), 4096: (16.41, 18.11), 8192: (18.11, 21.50)},
        (81_007_104, 553_648_128, 31_199_744, 209_715_200),
    ),
    "deepseek_v2/236b": (
        (235_741_434_880, 21_375_800_320, 20_850_769_920),
        {2048: (140.20, 155.30), 4096: (155.30, 185.50), 8192: (185.50, 245.90)},
        (337_981_440, 3_774_873_600, 197_242_880, 524_288_000),
    ),
}


@pytest.fixture(scope="module")
def presets() -> dict[str, DeepseekV2Config]:
    """The config of each preset, as a command composes it."""
    names = ["deepseek_v2", *TABLE]
    configs = [compose([f"model={name}", "data=synthetic", "tokenizer=none"]).config.model for name in names]
    return {name: c for name, c in zip(names, configs, strict=True) if isinstance(c, DeepseekV2Config)}


def test_mod_2_the_tiny_member_has_the_published_size(presets: dict[str, DeepseekV2Config]) -> None:
    tiny = presets["deepseek_v2"]
    counts = count(tiny)
    assert counts.total - 2 * counts.embedding == 942_296
    assert moe_layers(tiny) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", TABLE)
def test_mod_2_counts_and_flops_equal_the_tables(name: str, presets: dict[str, DeepseekV2Config]) -> None:
    config, (totals, flops, layers) = presets[name], TABLE[name]
    counts = count(config)
    assert (counts.total, counts.active, counts.matmul) == totals
    for length, (causal, full) in flops.items():
        assert round(flops_per_token(config, length) / 1e9, 2) == causal
        assert round(flops_per_token(config, length, causal=False) / 1e9, 2) == full
    dense, moe = counts.layers[0], counts.layers[-1]
    assert (dense.rest, moe.experts, moe.rest, counts.embedding) == layers
    everything = sum(layer.experts + layer.rest for layer in counts.layers)
    assert counts.total == everything + 2 * counts.embedding + config.hidden_size


@pytest.mark.parametrize("name", ["deepseek_v2", *TABLE])
def test_mod_2_a_meta_build_has_exactly_these_parameters(
    name: str, presets: dict[str, DeepseekV2Config]
) -> None:
    config = presets[name]
    with torch.device("meta"):
        model = build(config, whole(config), operations(config))
    found = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert found == parameters(config)
    assert sum(p.numel() for p in model.parameters()) == count(config).total


@pytest.mark.parametrize(
    "changes", [{"tie_embeddings": True}, {"attention_bias": True}, {"num_shared_experts": 0}]
)
def test_switches_change_shapes_and_build_alike(changes: dict[str, object]) -> None:
    config = odd.deepseek_v2(**changes)
    model = build(config, whole(config), operations(config))
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == parameters(config)
    assert count(config).total != count(odd.deepseek_v2()).total


def test_mod_1_releases_write_out_what_counts_cannot_see(presets: dict[str, DeepseekV2Config]) -> None:
    """Keys that change the function but no shape; a change of the tiny member must not reach them."""
    for name, scaling in (("deepseek_v2/lite", 1.0), ("deepseek_v2/236b", 16.0)):
        config, yarn = presets[name], presets[name].yarn
        assert (config.rope_theta, config.rms_norm_eps, config.context) == (1e4, 1e-6, 163_840)
        assert (yarn.factor, yarn.original_length, yarn.mscale, yarn.mscale_all_dim) == (
            40,
            4096,
            0.707,
            0.707,
        )
        assert (yarn.beta_fast, yarn.beta_slow, yarn.truncate) == (32, 1, True)
        assert (config.top_k, config.routed_scaling, config.tie_embeddings) == (6, scaling, False)
    big, lite = presets["deepseek_v2/236b"], presets["deepseek_v2/lite"]
    assert (big.routing, big.num_groups, big.groups_kept) == ("group_limited_greedy", 8, 3)
    assert (lite.routing, lite.first_dense, big.first_dense) == ("greedy", 1, 1)


def test_a_tied_head_still_multiplies() -> None:
    """N_mm counts the head, whichever table it reads."""
    config = odd.deepseek_v2()
    assert count(replace(config, tie_embeddings=True)).matmul == count(config).matmul


def test_cfg_18_counts_and_names_import_no_torch() -> None:
    modules = "src.models.counts, src.models.names, src.models.schema, src.models.stage"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
