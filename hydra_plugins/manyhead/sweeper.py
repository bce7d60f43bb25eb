"""Hydra's own sweeper without its composition of each job: the launcher composes them all (SWEEP-1)."""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore


class ProductSweeper(BasicSweeper):
    """All combinations of the swept values."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing: Hydra would compose each job here to report the first that fails, and once more later."""


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="manyhead",
    node={
        "_target_": f"hydra_plugins.manyhead.sweeper.{ProductSweeper.__name__}",
        "max_batch_size": None,
        "params": None,
    },
    provider="manyhead",
)
