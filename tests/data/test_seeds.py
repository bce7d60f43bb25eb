"""Streams of randomness (SEED-1, SEED-4)."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from src.config import Config
from src.seeds import STREAMS, generator, key_bytes, seed_of, stream_key

SOURCES = [p for p in (Path(__file__).parents[2] / "src").rglob("*.py") if p.name != "seeds.py"]


def config(seed: int = 3, split: int = 42, shuffle: int | None = None, tokenizer: int = 7) -> Config:
    made = Config(seed=seed)
    made.data.split_seed, made.data.shuffle_seed, made.tokenizer.seed = split, shuffle, tokenizer
    return made


@pytest.mark.parametrize(
    ("changed", "moved"),
    [
        ({"seed": 4}, {"init", "order", "mixture", "balance", "sample"}),
        ({"split": 1}, {"split"}),
        ({"shuffle": 3}, set()),
        ({"shuffle": 5}, {"order", "mixture"}),
        ({"tokenizer": 8}, {"tokenizer"}),
        ({"seed": 4, "shuffle": 3}, {"init", "balance", "sample"}),
    ],
)
def test_seed_table(changed: dict[str, int], moved: set[str]) -> None:
    """Each seed moves its own streams and no other; shuffle_seed null follows seed."""
    before, after = config(), config(**changed)
    assert {s for s in STREAMS if key_bytes(before, s, 1) != key_bytes(after, s, 1)} == moved


def test_keys_separate_stream_seed_and_place() -> None:
    """No two places share a key, also where their texts would join to the same string."""
    places = [(), (1,), ("1",), (1, 2), ("12",), (12,), ("1", "2"), ("a", 1), ("a1",)]
    keys = [stream_key(s, seed, *place) for s in STREAMS for seed in (0, 1, 11) for place in places]
    assert len(set(keys)) == len(keys)


def test_key_is_pinned() -> None:
    """A changed derivation would change every run silently."""
    assert stream_key("init", 0, "lm_head.weight").hex()[:16] == "c5c3c31c8f0231fe"


def test_generators_depend_on_the_place_alone() -> None:
    first, other = generator(config(), "order", 5), generator(config(), "order", 6)
    first.random(1000)
    np.testing.assert_array_equal(generator(config(), "order", 6).random(7), other.random(7))
    assert not np.array_equal(
        generator(config(), "order", 5).random(7), generator(config(), "order", 6).random(7)
    )


def test_an_unknown_stream_is_refused() -> None:
    with pytest.raises(AssertionError, match="no stream"):
        seed_of(config(), "ordre")


def test_no_global_generator_is_drawn_from() -> None:
    """SEED-1's lint: neither Python's, numpy's nor torch's global generator is seeded or drawn from.

    But where transformers draws the weights of its model: it knows no other, and a fork of it is seeded.
    """
    forbidden = re.compile(
        r"^\s*(import random|from random import)|np\.random\.(?!Generator|Philox)\w|"
        r"torch\.(manual_seed|seed\(|rand\(|randn\(|randint\(|randperm\()|\.cuda\.manual_seed",
        re.MULTILINE,
    )
    found = {str(p): m.group() for p in SOURCES if (m := forbidden.search(p.read_text()))}
    (name,) = found
    assert (Path(name).name, found[name]) == ("transformers.py", "torch.manual_seed")
    assert "fork_rng" in Path(name).read_text()


def test_one_module_draws_from_the_seed() -> None:
    """SEED-1: elsewhere `config.seed` is only named or reported, and those modules draw nothing."""
    readers = {p for p in SOURCES if re.search(r"\bconfig\.seed\b", p.read_text())}
    drawing = {p.name for p in readers if "src.seeds" in p.read_text()} - {"bpe.py"}
    assert drawing == set()
