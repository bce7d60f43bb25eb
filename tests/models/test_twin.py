"""DENSE-1: `model.match` against sizes and sums that are written out here, from the papers' formulas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from src.compose import compose, config_loader, dump_config, identity, load_config
from src.composer import Composer
from src.config import Config
from src.errors import UserError
from src.models import twin as twins
from src.models.counts import count
from src.models.schema import FAMILIES, DenseConfig, ModelConfig
from src.models.twin import ATTENTION, MEASURES, measured, twin
from tests.models import odd

SYNTHETIC = ("data=synthetic", "tokenizer=none")
LENGTH = 256
TWINS = {
    "deepseek_v2": (64, 7, 4, 4, 16),
    "deepseek_v2/lite": (2048, 27, 16, 16, 128),
    "deepseek_v2/236b": (5120, 60, 40, 40, 128),
    "qwen3_moe": (64, 8, 6, 2, 16),
    "qwen3_moe/30b_a3b": (2048, 48, 32, 4, 128),
}
"""Preset → hidden size, layers, heads of queries and of keys, head width of its twin."""


def composed(*overrides: str) -> Config:
    """A run of the dense family, as a command composes it."""
    return compose(["model=dense", *SYNTHETIC, *overrides]).config


def dense(config: Config) -> DenseConfig:
    assert isinstance(config.model, DenseConfig)
    return config.model


def active(m: DenseConfig) -> int:
    """2·V·D + D + L·(q, o + k, v + three of the FFN + two gains), counted by hand."""
    D, C = m.hidden_size, m.head_dim
    layer = 2 * D * m.num_heads * C + 2 * D * m.num_kv_heads * C + 3 * D * m.intermediate_size + 2 * D
    return 2 * (m.vocab_size or 0) * D + D + m.num_layers * layer


def flops(m: DenseConfig, length: int) -> int:
    """6 per weight of a product, and 6·(S/2)·H·2C per layer of causal attention."""
    products = active(m) - (m.vocab_size or 0) * m.hidden_size - (2 * m.num_layers + 1) * m.hidden_size
    return 6 * products + 6 * length // 2 * m.num_layers * m.num_heads * 2 * m.head_dim


def distance(m: DenseConfig, measure: str) -> int:
    found = active(m) if measure == "active" else flops(m, LENGTH)
    assert m.match_target is not None
    return abs(found - m.match_target)


def is_nearest(m: DenseConfig, measure: str) -> bool:
    """No other width comes nearer."""
    others = [replace(m, intermediate_size=m.intermediate_size + step) for step in (-1, 1)]
    return all(distance(m, measure) <= distance(other, measure) for other in others)


@pytest.mark.slow
@pytest.mark.parametrize("preset", TWINS)
@pytest.mark.parametrize("measure", MEASURES)
def test_dense_1_the_twin_counts_as_many(preset: str, measure: str) -> None:
    """Width, depth and vocabulary of the preset, sensible heads, and the nearest FFN width."""
    other = compose([f"model={preset}", *SYNTHETIC]).config.model
    m = dense(composed(f"model.match={preset}:{measure}"))
    assert (m.hidden_size, m.num_layers, m.num_heads, m.num_kv_heads, m.head_dim) == TWINS[preset]
    assert (m.vocab_size, m.context, m.rms_norm_eps) == (other.vocab_size, other.context, other.rms_norm_eps)
    assert m.match_target == measured(other, measure, LENGTH)
    assert (active(m), flops(m, LENGTH)) == (count(m).active, measured(m, "flops", LENGTH))
    assert is_nearest(m, measure)
    assert distance(m, measure) <= 0.002 * m.match_target


def test_dense_1_a_width_that_is_not_rounded_to_the_nearest_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutation: the width below."""
    monkeypatch.setattr(twins, "round", lambda x: int(x) - 1, raising=False)
    assert not is_nearest(dense(composed("model.match=deepseek_v2/lite:active")), "active")


@settings(max_examples=25, deadline=None)
@given(
    some.sampled_from(odd.MIXTURES),
    some.integers(1, 9),
    some.integers(1, 40),
    some.integers(60, 300),
    some.sampled_from(sorted(MEASURES)),
)
def test_dense_1_any_mixture_has_a_twin(
    family: str, layers: int, halves: int, vocabulary: int, measure: str
) -> None:
    """Odd sizes: the width is the nearest, heads are even and divide."""
    other: ModelConfig = odd.MEMBERS[family](num_layers=layers, hidden_size=2 * halves + 31)
    m = twin(odd.dense(vocab_size=vocabulary), other, measure, LENGTH, ())
    assert (m.head_dim % 2, m.num_heads % m.num_kv_heads, m.hidden_size) == (0, 0, other.hidden_size)
    assert is_nearest(m, measure)


def test_dense_1_what_was_typed_stays() -> None:
    """A typed size stays even where it is the family's default, and the vocabulary is that of both."""
    typed = ("model.num_layers=6", "model.num_heads=8", "model.num_kv_heads=8", "model.vocab_size=301")
    m = dense(composed("model.match=deepseek_v2:active", *typed))
    assert (m.num_layers, m.num_heads, m.num_kv_heads, m.vocab_size) == (6, 8, 8, 301)
    other = compose(["model=deepseek_v2", *SYNTHETIC, "model.vocab_size=301"]).config.model
    assert m.match_target == count(other).active
    assert is_nearest(m, "active")


def test_dense_1_what_an_experiment_sets_stays() -> None:
    """Keys of a file count as typed, those of the family's own file do not."""
    with config_loader() as loader:
        composer = Composer(loader)
        keys = composer.given(["model=dense/llama3_8b", "model.num_heads=8"])
        assert {"model.num_heads", "model.num_layers", "model.vocab_size"} <= keys
        assert "model.attention_bias" not in keys
        assert not {key for key in composer.given(["model=dense"]) if key.startswith("model.")}


def test_dense_1_config_yaml_needs_no_second_resolution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks and resume read numbers, and the identity is made of them."""
    config = composed("model.match=deepseek_v2:active")
    monkeypatch.delattr("src.compose.size_like")
    (tmp_path / "config.yaml").write_text(dump_config(config))
    read = load_config(tmp_path / "config.yaml")
    assert read == config
    assert identity(read) == identity(config)
    wider = replace(config, model=replace(dense(config), intermediate_size=1))
    assert identity(wider) != identity(config)


REFUSED = {
    "model.match=deepseek_v2/lit:active": ("did you mean deepseek_v2/lite?", "qwen3_moe/30b_a3b"),
    "model.match=deepseek_v2:activ": ("'activ' is no measure", "model.match=deepseek_v2:flops"),
    "model.match=deepseek_v2": ("no measure behind 'deepseek_v2'", "model.match=deepseek_v2:active"),
    "model.match=olmoe:active": ("reserved", "what exists: deepseek_v2"),
    "model.match=hf:active": ("no preset 'hf'", "what exists: deepseek_v2"),
    "model.match=dense/twin:active": ("dense/twin itself follows", "model.match=deepseek_v2:active"),
    "model.match_target=5": ("leave it out",),
    "model.match=deepseek_v2:active model.intermediate_size=176": ("decides it", "leave one of the two out"),
    "model.match=deepseek_v2:active model.num_layers=90": ("no FFN is left", "model.num_layers"),
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_dense_1_mistakes_are_one_clear_error(overrides: str) -> None:
    with pytest.raises(UserError) as refused:
        composed(*overrides.split())
    assert refused.value.code == 2
    assert [words for words in REFUSED[overrides] if words not in str(refused.value)] == []


def test_dense_1_both_parts_may_be_wrong_at_once() -> None:
    with pytest.raises(UserError) as refused:
        composed("model.match=deepseek:actve")
    assert len(refused.value.problems) == 2


def test_dense_1_every_family_of_ours_has_a_twin() -> None:
    assert set(ATTENTION) == set(FAMILIES) - {"hf"}
