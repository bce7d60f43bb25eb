"""Steps for training and rounds for evaluation, read ahead by one thread (LOAD-1 to LOAD-3, EVAL-1)."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor

from src.config import Config
from src.trainer.data.batch import MicroBatch, StepBatch
from src.trainer.data.corpus import Data
from src.trainer.data.order import Order, heldout_order, slots
from src.trainer.data.packed import FILLER

STOP_POLL_SECONDS = 0.05
"""How long a thread with a full queue sleeps before it looks whether it is to stop."""


class Loader:
    """The steps of one data coordinate from `start_step` on; use as a context.

    Reads `data.prefetch` steps ahead; the depth changes no batch.
    """

    def __init__(
        self, config: Config, data: Data, coordinate: int, coordinates: int, start_step: int
    ) -> None:
        self._config = config
        self._data = data
        self._coordinate, self._coordinates = coordinate, coordinates
        self._order = Order(config, len(data.train))
        self._pins = config.platform.name != "cpu" and torch.cuda.is_available()
        self._next = start_step
        self._stop = threading.Event()
        self._ready: queue.Queue[StepBatch | Exception] = queue.Queue(config.data.prefetch)
        self._thread = threading.Thread(target=self._work, args=(start_step,), name="loader", daemon=True)

    def step(self, step: int) -> StepBatch:
        """All micro-batches of a step, counted from 0; steps must be asked for in order.

        Raises what the reading thread met at this step, as RuntimeError naming artifact, sample and document.
        """
        assert step == self._next, f"step {step} asked for, step {self._next} is next"
        found = self._ready.get()
        if isinstance(found, Exception):
            raise RuntimeError(f"step {step}: {found}") from found
        self._next += 1
        return found

    def close(self) -> None:
        """End the thread; waits for the read under way, not for the queue to fill."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _work(self, step: int) -> None:
        while not self._stop.is_set():
            found: StepBatch | Exception
            try:
                found = self.read(step)
            except Exception as error:
                found = error
            if not self._put(found) or isinstance(found, Exception):
                return
            step += 1

    def _put(self, found: StepBatch | Exception) -> bool:
        while not self._stop.is_set():
            try:
                self._ready.put(found, timeout=STOP_POLL_SECONDS)
                return True
            except queue.Full:
                continue
        return False

    def read(self, step: int) -> StepBatch:
        """Read a step here and now; a function of the step alone (ORDER-2)."""
        config = self._config
        size, coordinates = config.micro_batch_size, self._coordinates
        first = step * config.global_batch_size
        micro_batches = []
        for m in range(config.global_batch_size // (size * coordinates)):
            mine = [first + slot for slot in slots(m, self._coordinate, coordinates, size)]
            micro_batch = self._data.train.micro_batch([self._order.at(place).sample for place in mine])
            micro_batches.append(dataclasses.replace(micro_batch, first=mine[0]))
        pinned = map(_pinned, micro_batches) if self._pins else micro_batches
        return StepBatch(tuple(pinned), epoch=self._order.at(first).epoch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def heldout_batches(config: Config, data: Data, coordinate: int, coordinates: int) -> Iterator[MicroBatch]:
    """The held-out samples of one data coordinate, each sample on exactly one of them (EVAL-1).

    Every coordinate gets the same number of micro-batches; the last round is filled with samples of pads.
    """
    size = config.micro_batch_size
    samples = heldout_order(config, len(data.heldout))
    rounds = -(-len(samples) // (size * coordinates))
    for m in range(rounds):
        chosen = [samples[i] if i < len(samples) else FILLER for i in slots(m, coordinate, coordinates, size)]
        yield data.heldout.micro_batch(chosen)


def _pinned(micro_batch: MicroBatch) -> MicroBatch:
    """The same tensors in pinned memory, so that copies to the GPU are asynchronous."""
    tensors: dict[str, Any] = {
        field.name: value.pin_memory()
        for field in dataclasses.fields(micro_batch)
        if isinstance(value := getattr(micro_batch, field.name), Tensor)
    }
    return dataclasses.replace(micro_batch, **tensors)
