"""Hydra's launchers for multiruns: every job in a process of its own, here, on Slurm or on Spur."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from src.launchers.sweep import Batch


class LocalLauncher(Launcher):
    """Hands the jobs of a sweep to `src.launchers.sweep`."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what composition needs; the task function is never called, for jobs are processes (HYD-11)."""
        self.hydra_context = hydra_context
        self.config = config
        self.code = 0

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all jobs; each returns the value of `sweep.objective`, a failed one nan (SWEEP-10)."""
        from src.launchers.sweep_end import objective

        returns = []
        for job in self.run(job_overrides, initial_job_idx).jobs:
            returned = JobReturn(overrides=job.overrides, status=JobStatus.COMPLETED)
            returned.return_value = objective(job)
            returns.append(returned)
        return returns

    def run(self, job_overrides: Sequence[Sequence[str]], first: int) -> Batch:
        """The same with how each job ended; the code of the first batch that failed is kept (EXIT-2)."""
        from src.launchers.sweep import run_batch

        overrides = [list(job) for job in job_overrides]
        batch = run_batch(self.hydra_context.config_loader, self.config, overrides, first=first)
        self.code = self.code or batch.code
        return batch


class SlurmLauncher(LocalLauncher):
    """The same sweep; its jobs' configs say `launcher=slurm`, so `run_sweep` submits them as arrays."""


class SpurLauncher(LocalLauncher):
    """The same sweep; its jobs' configs say `launcher=spur`, so `run_sweep` submits them one by one."""


for _name, _class in (
    ("manyhead_local", LocalLauncher),
    ("manyhead_slurm", SlurmLauncher),
    ("manyhead_spur", SpurLauncher),
):
    ConfigStore.instance().store(
        group="hydra/launcher",
        name=_name,
        node={"_target_": f"hydra_plugins.manyhead.launcher.{_class.__name__}"},
        provider="manyhead",
    )
