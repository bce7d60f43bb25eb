"""Which scheduler a config means."""

from __future__ import annotations

from src.config import Config
from src.launchers.scheduler import Scheduler
from src.launchers.slurm import Slurm
from src.launchers.spur import Spur


def scheduler_of(config: Config) -> Scheduler:
    """The scheduler of a launcher that submits jobs."""
    return Spur() if config.launcher.name == "spur" else Slurm()
