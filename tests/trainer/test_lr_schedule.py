"""The learning rate is a pure function of step and config (CKPT-3, CFG-3, CFG-19)."""

import math

import pytest

from src.config import Config, LrScheduleConfig, OptimizerConfig
from src.trainer.lr_schedule import learning_rate


def config(kind: str, warmup: int = 3, decay: int = 4, horizon: int | None = None, steps: int = 11) -> Config:
    schedule = LrScheduleConfig(kind=kind, warmup=warmup, decay=decay, horizon=horizon, floor=0.2)
    return Config(optimizer=OptimizerConfig(lr=0.7), lr_schedule=schedule, max_steps=steps)


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_warmup_rises_linearly_and_zero_warmup_starts_at_the_peak(kind: str) -> None:
    """CFG-3: `warmup=0` is a value."""
    trace = [learning_rate(config(kind), s) for s in range(3)]
    assert trace == pytest.approx([0.7 / 3, 1.4 / 3, 0.7])
    assert learning_rate(config(kind, warmup=0), 0) == pytest.approx(0.7)


def test_cosine_by_hand() -> None:
    for step in range(3, 11):
        share = 0.5 * (1 + math.cos(math.pi * (step - 3) / 8))
        assert learning_rate(config("cosine"), step) == pytest.approx(0.7 * (0.2 + 0.8 * share))
    assert learning_rate(config("cosine"), 400) == pytest.approx(0.14)


def test_wsd_by_hand() -> None:
    trace = [learning_rate(config("wsd"), s) for s in range(3, 12)]
    assert trace == pytest.approx([0.7] * 5 + [0.7 * (0.2 + 0.8 * k / 4) for k in (3, 2, 1, 0)])


def test_horizon_not_max_steps_shapes_the_curve() -> None:
    """CFG-19: with a set horizon, another length continues the same curve."""
    short, long = config("cosine", horizon=20, steps=5), config("cosine", horizon=20, steps=20)
    assert [learning_rate(short, s) for s in range(5)] == [learning_rate(long, s) for s in range(5)]
    assert learning_rate(config("cosine", steps=5), 4) != learning_rate(config("cosine", steps=20), 4)
