"""`debug.dump_batches`: every micro-batch as a line of `RUN/batches/rank_RRRRR.jsonl` (LOAD-4)."""

from __future__ import annotations

from src.trainer.callbacks.base import Callback
from src.trainer.data.batch import MicroBatch, StepBatch
from src.trainer.metrics import append_lines
from src.trainer.state import Run


class DumpBatches(Callback):
    """Writes what a step and an evaluation are handed."""

    def batch(self, run: Run, batch: StepBatch) -> None:
        _write(run, [_line(run, m, number, "train") for number, m in enumerate(batch.micro_batches)])

    def heldout(self, run: Run, number: int, micro_batch: MicroBatch) -> None:
        _write(run, [_line(run, micro_batch, number, "heldout")])


def _write(run: Run, lines: list[dict[str, object]]) -> None:
    path = run.directory / "batches" / f"rank_{run.runtime.rank:05d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    append_lines(path, lines)


def _line(run: Run, m: MicroBatch, number: int, split: str) -> dict[str, object]:
    return {
        "step": run.step + (split == "train"),
        "micro_batch": number,
        "split": split,
        "coordinate": run.runtime.data_coordinate,
        "samples": list(m.samples),
        "ids": m.ids_BS.tolist(),
        "labels": m.labels_BS.tolist(),
        "positions": m.positions_BS.tolist(),
        "cu_seqlens": None if m.cu_seqlens is None else m.cu_seqlens.tolist(),
        "documents": None if m.documents_BS is None else m.documents_BS.tolist(),
    }
