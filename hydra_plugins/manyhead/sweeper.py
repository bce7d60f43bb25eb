"""Hydra's sweepers: its own product of values without its composition of each job, and Optuna's search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from src.launchers.optuna_config import SAMPLERS, Settings

if TYPE_CHECKING:
    from src.launchers.sweep import Runner


def ours(launcher: Launcher | None) -> Runner:
    """The launcher, which must be one of ours; raises UserError (2)."""
    from src.errors import Problem, UserError
    from src.launchers.sweep import Runner

    if not isinstance(launcher, Runner):
        fix = "choose where jobs run by launcher=, and leave hydra/launcher alone"
        message = f"{type(launcher).__name__} would train in the launching process"
        raise UserError([Problem("hydra/launcher", message, fix, "SWEEP-7")])
    return launcher


class ProductSweeper(BasicSweeper):
    """All combinations of the swept values; leaves by SystemExit if a job failed (EXIT-2)."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing: Hydra would compose each job here to report the first that fails, and once more later."""

    def sweep(self, arguments: list[str]) -> Any:
        """See the class."""
        launcher = ours(self.launcher)
        returns = super().sweep(arguments)
        if launcher.code:
            raise SystemExit(launcher.code)
        return returns


class OptunaSweeper(Sweeper):
    """What Optuna asks for, batch by batch: see `src.launchers.study`."""

    def __init__(self, **settings: Any) -> None:
        self._settings = Settings(**settings)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep the launcher, and what composes."""
        self._loader = hydra_context.config_loader
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the search; leaves by SystemExit if a trial failed or was stopped."""
        from src.launchers.study import run_study

        code = run_study(self._loader, arguments, self._settings, ours(self._launcher).run)
        if code:
            raise SystemExit(code)


_NODES: dict[tuple[str, str], Any] = {
    ("hydra/sweeper", "manyhead"): {
        "_target_": f"hydra_plugins.manyhead.sweeper.{ProductSweeper.__name__}",
        "max_batch_size": None,
        "params": None,
    },
    ("hydra/sweeper", "optuna"): Settings,
    **{("hydra/sweeper/sampler", name): node for name, node in SAMPLERS.items()},
}
for (_group, _name), _node in _NODES.items():
    ConfigStore.instance().store(group=_group, name=_name, node=_node, provider="manyhead")
