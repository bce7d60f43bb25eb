"""The table of a run: ours for `gpipe` and `1f1b`, torch's for the schedules with several stages a rank."""

from __future__ import annotations

from src.trainer.parallel.pipeline.adapter import torch_table
from src.trainer.parallel.pipeline.schedule import TABLES, Table


def make_table(schedule: str, ranks: int, per_rank: int, micro_batches: int) -> Table:
    """The order of computations that `pipeline.schedule` gives each of `ranks` pipeline ranks (ENG-13).

    `rules.check` says which numbers go together; others give tables that cannot run.
    """
    if schedule in TABLES:
        assert per_rank == 1, (schedule, per_rank)
        return TABLES[schedule](ranks, micro_batches)
    return torch_table(schedule, ranks, per_rank, micro_batches)
