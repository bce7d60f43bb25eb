"""One optimizer step: batch, token count, forward and backward, norm, clipping, update."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from src.trainer.callbacks.base import Callback
from src.trainer.data.batch import StepBatch
from src.trainer.data.loader import Loader
from src.trainer.lr_schedule import learning_rate
from src.trainer.metrics import StepRecord
from src.trainer.optimizer import clip_factor
from src.trainer.state import Run
from src.trainer.step_time import StepTime


def train_step(run: Run, loader: Loader, callbacks: Sequence[Callback]) -> tuple[StepRecord, bool]:
    """Run one step and return its record, and whether all ranks are to stop because one was asked to.

    All micro-batches are fetched first, so the global count of target tokens is known before the first
    forward (ENG-4). Nothing waits for the kernels of this step (ENG-8).
    """
    started, step_time = time.perf_counter(), StepTime(run.runtime.device)
    batch = loader.step(run.step)
    data_time = time.perf_counter() - started
    for callback in callbacks:
        callback.batch(run, batch)
    totals = count_world(run, batch)
    sums = run.backend.forward_backward(batch, totals[0])
    norm, loss = run.backend.norm_and_loss(sums.loss)
    reason = run.health.judge(norm, loss)
    skip = (reason > 0).double()
    lr = learning_rate(run.config, run.step)
    run.optimizer.step(lr, clip_factor(norm, run.config.optimizer.max_norm), skip)
    run.optimizer.zero_grad()
    run.backend.finish_step(skip)
    run.step += 1
    stop = run.agreement.reached(totals[2])
    step_time.stop()
    record = StepRecord(
        step=run.step,
        sums=torch.stack([sums.loss.double(), sums.aux.double(), sums.z.double()]),
        globals=torch.stack([norm.double(), reason.double(), *totals[:2].double()]),
        counts=sums.counts,
        bias=run.backend.largest_bias(),
        lr=lr,
        epoch=batch.epoch,
        step_time=step_time,
        data_time=data_time,
    )
    return record, stop


def count_world(run: Run, batch: StepBatch) -> Tensor:
    """int64 [3] over the global batch: target tokens, tokens, and ranks that were asked to stop.

    Ranks that differ in pp or cp hold the same samples, so only the first of them counts its own.
    """
    runtime = run.runtime
    counts = (batch.target_tokens, batch.tokens) if runtime.counts_samples else (0, 0)
    here = torch.tensor([*counts, int(run.stop.asked())])
    if runtime.device.type == "cuda":  # From memory that is not pinned a copy waits for the step before.
        here = here.pin_memory().to(runtime.device, non_blocking=True)
    return runtime.sum_world(here)
