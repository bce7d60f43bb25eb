"""Which updates are applied: not finite, spikes, skips in a row; the state that a resume needs (ENG-27)."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from src.config import BalanceConfig, CheckpointConfig, Config, OptimizerConfig, SpikeConfig
from src.errors import UserError
from src.trainer.health import REASONS, Health
from tests.trainer.small import lines, poison, run_here, small_config
from tests.trainer.test_loop import same, trace, weights

WINDOW, DEVIATIONS = 7, 2.5
CPU = torch.device("cpu")


def spike_config(**changes: Any) -> Config:
    return Config(spike=SpikeConfig(window=WINDOW, deviations=DEVIATIONS), **changes)


def judged(health: Health, values: list[tuple[float, float]]) -> list[str | None]:
    """Reasons for (loss, norm) of steps in a row."""
    return [
        REASONS[int(health.judge(torch.tensor(norm), torch.tensor(loss, dtype=torch.float64)))]
        for loss, norm in values
    ]


def by_hand(values: list[tuple[float, float]]) -> list[str | None]:
    """The rule over a plain list of applied steps; no run of skips is long enough to halt."""
    applied: list[tuple[float, float]] = []
    reasons: list[str | None] = []
    for loss, norm in values:
        last = np.array(applied[-WINDOW:])
        reason = None
        if not math.isfinite(norm):
            reason = "nonfinite"
        elif len(last) == WINDOW:
            limits = last.mean(0) + DEVIATIONS * last.std(0, ddof=1)
            reason = "norm_spike" if norm > limits[1] else None
            reason = "loss_spike" if loss > limits[0] else reason
        reasons.append(reason)
        applied += [(loss, norm)] if reason is None else []
    return reasons


def series() -> list[tuple[float, float]]:
    """Sixty noisy steps with spikes of either kind, one before the window is full, and one of NaN."""
    draw = np.random.default_rng(3)
    values = [(float(4 + draw.normal() * 0.1), float(1 + draw.normal() * 0.1)) for _ in range(60)]
    values[3] = (9.0, 1.0)
    for step, value in {20: (7.0, 1.0), 31: (4.0, 5.0), 32: (8.0, 8.0), 45: (4.0, math.nan)}.items():
        values[step] = value
    return values


def test_spikes_are_those_of_the_rule() -> None:
    """ENG-27: mean and deviation of the last applied steps, skipped ones left out; nothing before they are 7.

    Values that fall are no spikes. Without `deviations` only what is not finite is skipped.
    """
    values = series()
    health = Health(spike_config(nonfinite="skip", max_skips=60), CPU)
    expected = by_hand(values)
    assert judged(health, values) == expected
    assert [expected[step] for step in (3, 20, 31, 32, 45)] == [
        *(None, "loss_spike", "norm_spike", "loss_spike", "nonfinite")
    ]
    assert judged(health, [(0.0, 0.0)]) == [None]
    off = judged(Health(Config(nonfinite="skip"), CPU), values)
    assert [step for step, reason in enumerate(off) if reason] == [45]


def test_a_skipped_spike_does_not_widen_the_window() -> None:
    """The same jump is skipped again: mutation, a window that takes it in, would let it pass."""
    steady = [(4 + 0.01 * (-1) ** step, 1.0 + 0.01 * (-1) ** step) for step in range(WINDOW)]
    health = Health(spike_config(max_skips=9), CPU)
    assert judged(health, [*steady, *[(6.0, 1.0)] * 4])[WINDOW:] == ["loss_spike"] * 4
    taken_in = np.array([*steady[1:], (6.0, 1.0)])
    assert taken_in.mean(0)[0] + DEVIATIONS * taken_in.std(0, ddof=1)[0] > 6.0


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_spikes_and_what_is_not_finite_count_together(nonfinite: str) -> None:
    """ENG-27: `max_skips` in a row, whatever the reason; `stop` halts at once only where not finite."""
    steady = [(4 + 0.01 * (-1) ** step, 1.0 + 0.01 * (-1) ** step) for step in range(WINDOW)]
    health = Health(spike_config(nonfinite=nonfinite, max_skips=2), CPU)
    assert judged(health, [*steady, (6.0, 1.0), (6.0, 1.0), (4.0, 1.0)])[WINDOW:] == [
        *["loss_spike"] * 2,
        None,
    ]
    assert not bool(health.halted)
    reasons = judged(health, [(4.0, 9.0), (math.nan, math.nan), (4.0, 1.0), (6.0, 1.0)])
    assert reasons[:2] == ["norm_spike", "nonfinite"]
    assert bool(health.halted) == (nonfinite == "stop")
    assert reasons[2:] == (["halted", "loss_spike"] if nonfinite == "stop" else [None, "loss_spike"])
    assert judged(health, [(6.0, 1.0), (6.0, 1.0), (4.0, 1.0)])[-1] == "halted"


def test_the_state_goes_through_json() -> None:
    """CKPT-3: saved at any step, the rest is bitwise as undisturbed; a shorter window keeps the newest."""
    values = series()
    for cut in (0, 4, 21, 33):
        whole, first = (Health(spike_config(nonfinite="skip"), CPU) for _ in range(2))
        expected = judged(whole, values)
        judged(first, values[:cut])
        second = Health(spike_config(nonfinite="skip"), CPU)
        second.load(json.loads(json.dumps(first.state(), allow_nan=False)))
        assert judged(second, values[cut:]) == expected[cut:]
        assert second.state() == whole.state()
    short = Health(Config(spike=SpikeConfig(window=3, deviations=9.0)), CPU)
    short.load(whole.state())
    assert short.state()["recent_norms"] == whole.state()["recent_norms"][-3:]
    short.load({})
    assert len(short.state()["recent_losses"]) == 3


@pytest.mark.slow
def test_eight_steps_equal_four_and_four_with_spikes_and_bias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CKPT-3, ENG-25, ENG-27: window, skips in a row and bias go on where they were; a spike is marked.

    Steps 4 and 5 jump, the last before the save and the first after it: one more skip would end the run.
    """
    config = small_config(
        tmp_path,
        optimizer=OptimizerConfig(kind="adamw", lr=0.02),
        balance=BalanceConfig(kind="bias", bias_rate=0.01, z_loss=1e-3),
        spike=SpikeConfig(window=2, deviations=50.0),
        checkpoint=CheckpointConfig(every=0),
        max_skips=2,
        max_steps=8,
    )
    jumps = {3: (1e4, 0.0), 4: (0.0, 1e4)}
    poison(monkeypatch, jumps)
    run_here(config, tmp_path / "straight")
    poison(monkeypatch, jumps)
    assert run_here(config, tmp_path / "halves", stop_after=3) is True
    run_here(config, tmp_path / "halves", attempt=2)
    found = lines(tmp_path / "halves")
    assert [line["skip_reason"] for line in found] == [*[None] * 3, "norm_spike", "loss_spike", *[None] * 3]
    assert [line["skipped"] for line in found] == [reason["skip_reason"] is not None for reason in found]
    assert [line["moe"] for line in found] == [line["moe"] for line in lines(tmp_path / "straight")]
    assert found[0]["moe"]["bias_max"] == pytest.approx(0.01)
    assert found[3]["moe"]["bias_max"] == found[4]["moe"]["bias_max"] == found[2]["moe"]["bias_max"]
    assert trace(tmp_path / "straight") == trace(tmp_path / "halves")
    one = weights(tmp_path / "straight", 8, tmp_path / "a.safetensors")
    biases = [tensor for name, tensor in one.items() if name.endswith("mlp.gate.e_score_correction_bias")]
    assert [tensor.dtype for tensor in biases] == [torch.float32] * 2
    assert all(bool(tensor.any()) for tensor in biases)
    assert same(one, weights(tmp_path / "halves", 8, tmp_path / "b.safetensors"))
    poison(monkeypatch, jumps)
    run_here(replace(config, max_skips=1, max_steps=4), tmp_path / "short")
    with pytest.raises(
        UserError, match=r"50\.0 deviations above its window at step 5; .* max_skips=1 in a row"
    ):
        run_here(replace(config, max_skips=1), tmp_path / "short", attempt=2)


def test_a_bias_weighs_no_term(tmp_path: Path) -> None:
    """ENG-25: `balance.coef` plays no part, a rate of 0 is bitwise `balance=none`; z-loss still counts."""
    runs = {
        "none": BalanceConfig(kind="none", z_loss=1e-2),
        "frozen": BalanceConfig(kind="bias", coef=9.0, bias_rate=0.0, z_loss=1e-2),
        "moved": BalanceConfig(kind="bias", bias_rate=0.5, z_loss=1e-2),
    }
    for name, balance in runs.items():
        run_here(small_config(tmp_path, balance=balance, max_steps=3), tmp_path / name)
    assert trace(tmp_path / "frozen") == trace(tmp_path / "none")
    assert trace(tmp_path / "moved") != trace(tmp_path / "none")
    assert all(line["aux_loss"] is None and line["z_loss"] > 0 for line in lines(tmp_path / "moved"))
