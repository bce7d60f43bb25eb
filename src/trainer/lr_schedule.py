"""Learning rate as a pure function of the step and the config (CKPT-3, CFG-19)."""

from __future__ import annotations

import math

from src.config import Config


def learning_rate(config: Config, step: int) -> float:
    """Learning rate of the optimizer step that follows `step` finished ones.

    Warm-up rises linearly and reaches the peak with its last step, so `warmup=0` starts at the peak. The
    schedule is laid out for `lr_schedule.horizon` steps (null: `max_steps`) and stays at its floor beyond.
    """
    schedule, peak = config.lr_schedule, config.optimizer.lr
    horizon = schedule.horizon or config.max_steps
    if step < schedule.warmup:
        return peak * (step + 1) / schedule.warmup
    if schedule.kind == "constant":
        return peak
    if schedule.kind == "cosine":
        progress = min(1.0, (step - schedule.warmup) / max(1, horizon - schedule.warmup))
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        share = min(1.0, max(0.0, (horizon - step) / max(1, schedule.decay)))
    return peak * (schedule.floor + (1.0 - schedule.floor) * share)
