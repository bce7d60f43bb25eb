"""`python -m tests.slurm.sweeping OVERRIDE…`: a multirun on Slurm, or Spur, whose ranks train nothing."""

from __future__ import annotations

import sys
from itertools import product

from omegaconf import OmegaConf

from src.compose import config_loader
from src.launchers.sweep import run_sweep

WORKER = "tests.launchers.fake_worker"

if __name__ == "__main__":
    typed = sys.argv[1:] if "launcher=spur" in sys.argv else ["launcher=slurm", *sys.argv[1:]]
    choices = [
        [f"{key}={v}" for v in values.split(",")] for key, _, values in (t.partition("=") for t in typed)
    ]
    master = OmegaConf.create({"hydra": {"overrides": {"task": typed}}})
    with config_loader() as loader:
        raise SystemExit(run_sweep(loader, master, [list(job) for job in product(*choices)], worker=WORKER))
