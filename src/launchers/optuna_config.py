"""Keys of `hydra.sweeper` when it is `optuna`, named as in Hydra's own plugin for Optuna (SWEEP-10)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import MISSING

from src.errors import Problem, UserError


@dataclass
class Settings:
    """The node as Hydra composes it, and what the sweeper is made with."""

    _target_: str = "hydra_plugins.manyhead.sweeper.OptunaSweeper"
    _recursive_: bool = False
    defaults: list[Any] = field(default_factory=lambda: [{"sampler": "tpe"}, "_self_"])
    sampler: Any = MISSING
    """A class of `optuna.samplers` with its arguments, made anew for each trial."""
    direction: str = "minimize"
    """`minimize` or `maximize` the value of `sweep.objective`."""
    n_trials: int = 20
    """Trials of the study in all, failed ones and those of earlier commands included."""
    n_jobs: int = 2
    """Trials that are asked for, and run, at a time."""
    storage: str | None = None
    """URL of Optuna's storage; null is a journal in the sweep's directory."""
    study_name: str | None = None
    """Null is a hash of code, data, config, space and objective."""
    params: dict[str, str] = field(default_factory=dict)
    """Overrides that a file says, by key; the command line wins."""

    @property
    def way(self) -> Literal["minimize", "maximize"]:
        """`direction`, checked."""
        return "maximize" if self.direction == "maximize" else "minimize"

    def check(self) -> None:
        """Raise `UserError` with everything that is wrong."""
        problems = []
        if self.direction not in ("minimize", "maximize"):
            message = f"{self.direction!r} is no direction"
            problems.append(
                Problem("hydra.sweeper.direction", message, "type minimize or maximize", "SWEEP-10")
            )
        for key in ("n_trials", "n_jobs"):
            if getattr(self, key) < 1:
                message = f"must be at least 1, not {getattr(self, key)}"
                problems.append(Problem(f"hydra.sweeper.{key}", message, rule="SWEEP-10"))
        if problems:
            raise UserError(problems)


SAMPLERS: dict[str, dict[str, Any]] = {
    "tpe": {
        "_target_": "optuna.samplers.TPESampler",
        "seed": None,
        "n_startup_trials": 10,
        "constant_liar": True,
    },
    "random": {"_target_": "optuna.samplers.RandomSampler", "seed": None},
}
"""Options of `hydra/sweeper/sampler`; the trials of a batch know of each other by the constant liar."""
