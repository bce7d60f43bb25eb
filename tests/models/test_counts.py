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
from src.models.names import parameters, window_of
from src.models.schema import DeepseekV2Config, GptOssConfig, ModelConfig, Qwen3MoeConfig
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
    "qwen3_moe/30b_a3b": (
        (30_532_122_624, 3_353_032_704, 3_041_656_832),
        {2048: (20.67, 23.08), 4096: (23.08, 27.91), 8192: (27.91, 37.58)},
        (None, 603_979_776, 19_140_864, 311_164_928),
    ),
    "qwen3_moe/235b_a22b": (
        (235_093_634_560, 22_190_763_520, 21_567_635_456),
        {2048: (138.87, 148.33), 4096: (148.33, 167.26), 8192: (167.26, 205.10)},
        (None, 2_415_919_104, 71_835_904, 622_329_856),
    ),
    "gpt_oss/20b": (
        (20_914_757_184, 4_187_440_704, 3_607_142_400),
        {2048: (22.32, 22.93), 4096: (22.93, 24.13), 8192: (24.13, 26.55)},
        (None, 796_538_880, 26_648_096, 579_133_440),
    ),
    "gpt_oss/120b": (
        (116_829_156_672, 5_711_982_912, 5_131_100_160),
        {2048: (31.81, 32.71), 4096: (32.71, 34.52), 8192: (34.52, 38.15)},
        (None, 3_186_155_520, 26_924_672, 579_133_440),
    ),
    "dense/llama3_8b": (
        (8_030_261_248, 8_030_261_248, 7_504_658_432),
        {2048: (46.64, 48.25), 4096: (48.25, 51.47), 8192: (51.47, 57.91)},
        (218_112_000, 0, 218_112_000, 525_336_576),
    ),
}
TINY = {
    "deepseek_v2": (942_296, [1, 2, 3, 4, 5, 6]),
    "qwen3_moe": (1_033_536, [0, 1, 2, 4, 5, 6, 7]),
    "gpt_oss": (553_684, [0, 1, 2, 3, 4, 5]),
    "dense": (314_176, []),
}
"""Parameters without the two tables, and the layers with experts."""


Presets = dict[str, ModelConfig]


@pytest.fixture(scope="module")
def presets() -> Presets:
    """The config of each preset, as a command composes it."""
    names = [*TINY, *TABLE]
    configs = [compose([f"model={name}", "data=synthetic", "tokenizer=none"]).config.model for name in names]
    return dict(zip(names, configs, strict=True))


@pytest.mark.parametrize("family", TINY)
def test_mod_2_the_tiny_member_has_the_published_size(family: str, presets: Presets) -> None:
    counts = count(presets[family])
    assert (counts.total - 2 * counts.embedding, moe_layers(presets[family])) == TINY[family]


@pytest.mark.parametrize("name", TABLE)
def test_mod_2_counts_and_flops_equal_the_tables(name: str, presets: Presets) -> None:
    config, (totals, flops, layers) = presets[name], TABLE[name]
    counts = count(config)
    assert (counts.total, counts.active, counts.matmul) == totals
    for length, (causal, full) in flops.items():
        assert round(flops_per_token(config, length) / 1e9, 2) == causal
        assert round(flops_per_token(config, length, causal=False) / 1e9, 2) == full
    dense, moe = next((layer.rest for layer in counts.layers if not layer.experts), None), counts.layers[-1]
    assert (dense, moe.experts, moe.rest, counts.embedding) == layers
    everything = sum(layer.experts + layer.rest for layer in counts.layers)
    assert counts.total == everything + 2 * counts.embedding + config.hidden_size


@pytest.mark.parametrize("name", [*TINY, *TABLE])
def test_mod_2_a_meta_build_has_exactly_these_parameters(name: str, presets: Presets) -> None:
    config = presets[name]
    with torch.device("meta"):
        model = build(config, whole(config), operations(config))
    found = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert found == parameters(config)
    assert sum(p.numel() for p in model.parameters()) == count(config).total


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v2", {"tie_embeddings": True}),
        ("deepseek_v2", {"attention_bias": True}),
        ("deepseek_v2", {"num_shared_experts": 0}),
        ("qwen3_moe", {"tie_embeddings": True}),
        ("qwen3_moe", {"attention_bias": True}),
        ("qwen3_moe", {"num_kv_heads": 3}),
        ("qwen3_moe", {"mlp_only_layers": [0, 2]}),
        ("qwen3_moe", {"decoder_sparse_step": 3}),
        ("gpt_oss", {"tie_embeddings": True}),
        ("gpt_oss", {"attention_bias": False}),
        ("gpt_oss", {"num_kv_heads": 3}),
        ("dense", {"tie_embeddings": True}),
        ("dense", {"attention_bias": True}),
        ("dense", {"num_kv_heads": 3}),
    ],
)
def test_switches_change_shapes_and_build_alike(family: str, changes: dict[str, object]) -> None:
    config = odd.MEMBERS[family](**changes)
    model = build(config, whole(config), operations(config))
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == parameters(config)
    assert count(config).total != count(odd.MEMBERS[family]()).total


@pytest.mark.parametrize(
    ("listed", "step", "routed"),
    [([], 1, [0, 1, 2, 3, 4, 5, 6]), ([5, 1], 1, [0, 2, 3, 4, 6]), ([], 3, [2, 5]), ([5], 3, [2])],
)
def test_route_3_dense_layers_by_list_and_by_step(listed: list[int], step: int, routed: list[int]) -> None:
    """ROUTE-3, TRAP-5: the list counts layers from 0, the step from 1."""
    config = odd.qwen3_moe(num_layers=7, mlp_only_layers=listed, decoder_sparse_step=step)
    assert moe_layers(config) == routed


def test_mod_1_qwen_releases_write_out_what_counts_cannot_see(presets: Presets) -> None:
    """MOD-1: transformers' class defaults renormalise nothing and turn by another base."""
    for name, heads in (("qwen3_moe/30b_a3b", 32), ("qwen3_moe/235b_a22b", 64)):
        config = presets[name]
        assert isinstance(config, Qwen3MoeConfig)
        assert (config.rope_theta, config.rms_norm_eps, config.context) == (1e6, 1e-6, 40_960)
        assert (config.norm_topk_prob, config.mlp_only_layers, config.decoder_sparse_step) == (True, [], 1)
        assert (config.num_heads, config.num_kv_heads, config.head_dim, config.top_k) == (heads, 4, 128, 8)
        assert (config.tie_embeddings, config.attention_bias) == (False, False)


def test_mod_1_gpt_oss_releases_write_out_what_counts_cannot_see(presets: Presets) -> None:
    """MOD-1, ATT-6: both sizes differ in layers and experts only; windows lie on the even layers."""
    for name, layers, experts in (("gpt_oss/20b", 24, 32), ("gpt_oss/120b", 36, 128)):
        config = presets[name]
        assert isinstance(config, GptOssConfig)
        yarn = config.yarn
        assert (config.num_layers, config.num_experts, config.top_k) == (layers, experts, 4)
        assert (config.num_heads, config.num_kv_heads, config.head_dim) == (64, 8, 64)
        assert (config.rope_theta, config.rms_norm_eps, config.context) == (150_000, 1e-5, 131_072)
        assert (yarn.factor, yarn.original_length, yarn.truncate) == (32, 4096, False)
        assert (yarn.beta_fast, yarn.beta_slow, yarn.mscale, yarn.mscale_all_dim) == (32, 1, 0, 0)
        assert (config.swiglu_limit, config.swiglu_alpha, config.attention_bias) == (7.0, 1.702, True)
        assert [window_of(config, index) for index in range(4)] == [128, None, 128, None]
        assert not config.tie_embeddings


def test_flops_of_a_window_are_those_of_the_keys_it_shows() -> None:
    """MOD-2: min(k, W) in window layers; here k = S/2 = 6 is more than W = 5, and at S = 8 it is less."""
    config = odd.gpt_oss()
    per_key, matmul = 6 * 6 * 20, 6 * count(config).matmul
    assert flops_per_token(config, 12) == matmul + per_key * (5 + 6 + 5)
    assert flops_per_token(config, 12, causal=False) == matmul + per_key * (5 + 12 + 5)
    assert flops_per_token(config, 8) == matmul + per_key * (4 + 4 + 4)


def test_mod_1_releases_write_out_what_counts_cannot_see(presets: Presets) -> None:
    """Keys that change the function but no shape; a change of the tiny member must not reach them."""
    releases = {n: c for n, c in presets.items() if isinstance(c, DeepseekV2Config)}
    for name, scaling in (("deepseek_v2/lite", 1.0), ("deepseek_v2/236b", 16.0)):
        config, yarn = releases[name], releases[name].yarn
        assert (config.rope_theta, config.rms_norm_eps, config.context) == (1e4, 1e-6, 163_840)
        assert (yarn.factor, yarn.original_length, yarn.mscale, yarn.mscale_all_dim) == (
            40,
            4096,
            0.707,
            0.707,
        )
        assert (yarn.beta_fast, yarn.beta_slow, yarn.truncate) == (32, 1, True)
        assert (config.top_k, config.routed_scaling, config.tie_embeddings) == (6, scaling, False)
    big, lite = releases["deepseek_v2/236b"], releases["deepseek_v2/lite"]
    assert (big.routing, big.num_groups, big.groups_kept) == ("group_limited_greedy", 8, 3)
    assert (lite.routing, lite.first_dense, big.first_dense) == ("greedy", 1, 1)


def test_a_tied_head_still_multiplies() -> None:
    """N_mm counts the head, whichever table it reads."""
    config = odd.deepseek_v2()
    assert count(replace(config, tie_embeddings=True)).matmul == count(config).matmul


def test_cfg_18_counts_and_names_import_no_torch() -> None:
    modules = "src.models.counts, src.models.names, src.models.schema, src.models.stage, src.match"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
