"""`debug.dump_batches`: every micro-batch as a line of `RUN/batches/rank_RRRRR.jsonl` (LOAD-4)."""

from __future__ import annotations

from src.trainer.callbacks.base import Callback
from src.trainer.data.batch import MicroBatch, StepBatch
from src.trainer.metrics import append_lines
from src.trainer.state import Run


class DumpBatches(Callback):
    """Writes what the loader hands to the step."""

    def batch(self, run: Run, batch: StepBatch) -> None:
        path = run.directory / "batches" / f"rank_{run.runtime.rank:05d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        append_lines(path, [_line(run, m, number) for number, m in enumerate(batch.micro_batches)])


def _line(run: Run, m: MicroBatch, number: int) -> dict[str, object]:
    return {
        "step": run.step + 1,
        "micro_batch": number,
        "split": "train",
        "coordinate": run.runtime.data_coordinate,
        "samples": list(m.samples),
        "ids": m.ids_BS.tolist(),
        "labels": m.labels_BS.tolist(),
        "positions": m.positions_BS.tolist(),
        "cu_seqlens": None if m.cu_seqlens is None else m.cu_seqlens.tolist(),
        "documents": None if m.documents_BS is None else m.documents_BS.tolist(),
    }
