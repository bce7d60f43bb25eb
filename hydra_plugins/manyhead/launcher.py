"""Hydra's launchers for multiruns: every job in a process of its own, here, on Slurm or on Spur."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class LocalLauncher(Launcher):
    """Hands the jobs of a sweep to `src.launchers.sweep`; a code other than 0 ends the process (EXIT-2)."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what composition needs; the task function is never called, for jobs are processes (HYD-11)."""
        self.hydra_context = hydra_context
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all jobs and return a record of each; raises SystemExit with the sweep's code if not 0."""
        from src.launchers.sweep import run_sweep

        overrides = [list(job) for job in job_overrides]
        code = run_sweep(self.hydra_context.config_loader, self.config, overrides)
        if code:
            raise SystemExit(code)
        return [JobReturn(overrides=job, status=JobStatus.COMPLETED) for job in overrides]


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
