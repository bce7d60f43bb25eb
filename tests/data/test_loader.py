"""Steps for training and rounds for evaluation (LOAD-1 to LOAD-3, ORDER-2 to ORDER-4, EVAL-1, EVAL-4)."""

from __future__ import annotations

import dataclasses
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from src.trainer.data.batch import MicroBatch, StepBatch
from src.trainer.data.corpus import Data, open_data
from src.trainer.data.loader import Loader, heldout_batches
from src.trainer.data.order import Order, heldout_order
from src.trainer.data.packed import NO_TARGET, Packed
from tests.data.small import prepared, small_config, synthetic_config


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loader")


def opened(root: Path, **changes: Any) -> Data:
    config = small_config(root, **{"sequence_length": 96, **changes})
    prepared(config)
    return open_data(config)


def load(data: Data, steps: range, coordinate: int = 0, coordinates: int = 1) -> list[StepBatch]:
    with Loader(data.config, data, coordinate, coordinates, steps.start) as loader:
        return [loader.step(s) for s in steps]


def equal(a: MicroBatch, b: MicroBatch) -> bool:
    pairs = zip(vars(a).values(), vars(b).values(), strict=True)
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def same(a: StepBatch, b: StepBatch) -> bool:
    return a.epoch == b.epoch and all(map(equal, a.micro_batches, b.micro_batches))


def drawn(batches: list[StepBatch]) -> list[int]:
    return [s for batch in batches for m in batch.micro_batches for s in m.samples]


def test_steps_are_the_order_in_slots(root: Path) -> None:
    """ORDER-2, ORDER-3: step s takes samples [sB, sB + B) of the order."""
    data = opened(root)
    order = Order(data.config, len(data.train))
    for s, batch in enumerate(load(data, range(20))):
        assert len(batch.micro_batches) == 6
        assert drawn([batch]) == [order.at(s * 12 + slot).sample for slot in range(12)]
        assert batch.epoch == order.at(s * 12).epoch
        for index, m in enumerate(batch.micro_batches):
            assert m.first == s * 12 + 2 * index
            assert equal(m, replace(data.train.micro_batch(m.samples), first=m.first))
            assert m.target_tokens == int((m.labels_BS != NO_TARGET).sum())
    assert batch.epoch > 0, "the test is to see more than one epoch"


@pytest.mark.parametrize(("coordinates", "size"), [(2, 2), (3, 2), (4, 1), (6, 2), (2, 3)])
def test_any_number_of_coordinates_sees_the_same_samples(root: Path, coordinates: int, size: int) -> None:
    """ORDER-4: same set of samples and same token count of each step, none twice."""
    whole = load(opened(root), range(4))
    data = opened(root, micro_batch_size=size)
    parts = [load(data, range(4), d, coordinates) for d in range(coordinates)]
    order = Order(data.config, len(data.train))
    placed = [m for p in parts for batch in p for m in batch.micro_batches]
    assert [order.at(m.first + i).sample for m in placed for i in range(size)] == [
        sample for m in placed for sample in m.samples
    ]
    for s, batch in enumerate(whole):
        assert sorted(drawn([p[s] for p in parts])) == sorted(drawn([batch]))
        assert sum(p[s].target_tokens for p in parts) == batch.target_tokens
        assert sum(p[s].tokens for p in parts) == batch.tokens
        assert len({len(p[s].micro_batches) for p in parts}) == 1


def test_resume_needs_the_step_alone(root: Path) -> None:
    """ORDER-2: in mid-epoch and over all later epochs; `max_steps` and depth change no batch (LOAD-1)."""
    straight = load(opened(root), range(30))
    for start in (1, 7, 29):
        assert all(map(same, load(opened(root, max_steps=9999), range(start, 30)), straight[start:]))
    for depth in (1, 5):
        assert all(map(same, load(opened(root, data__prefetch=depth), range(30)), straight))


def test_steps_come_in_order(root: Path) -> None:
    data = opened(root)
    with Loader(data.config, data, 0, 1, 3) as loader, pytest.raises(AssertionError, match="step 3 is next"):
        loader.step(4)


class Spy:
    """A source that counts reads, waits for leave, and fails at a sample."""

    def __init__(self, packed: Packed) -> None:
        self.inner = packed.source
        self.name, self.lengths = self.inner.name, self.inner.lengths
        self.reads = 0
        self.leave = threading.Event()
        self.leave.set()
        self.bad: tuple[int, int] | None = None

    def read(self, document: int, start: int, length: int) -> Any:
        self.leave.wait(30)
        self.reads += 1
        if (document, start) == self.bad:
            raise OSError("disk on fire")
        return self.inner.read(document, start, length)

    def targets(self, document: int, start: int, length: int) -> None:
        return None


def spied(data: Data) -> tuple[Data, Spy]:
    spy = Spy(data.train)
    return dataclasses.replace(data, train=dataclasses.replace(data.train, source=spy)), spy


def test_an_error_is_raised_at_its_step_and_named(root: Path) -> None:
    """LOAD-2: not when the thread meets it, and after the steps before it."""
    data, spy = spied(opened(root, data__prefetch=3))
    sample = drawn(load(data, range(2, 3)))[7]
    document, start, length = data.train.plan.sample(sample)[-1].tolist()
    spy.bad = document, start
    with Loader(data.config, data, 0, 1, 0) as loader:
        loader.step(0)
        time.sleep(0.1)
        loader.step(1)
        place = f"sample {sample}, document {document}, tokens {start} to {start + length}"
        with pytest.raises(RuntimeError, match=rf"step 2: .*train\.bin: {place}: disk on fire"):
            loader.step(2)
        loader._thread.join(10)
        assert not loader._thread.is_alive(), "nothing is read after an error"


def test_stopping_does_not_wait_for_prefetch(root: Path) -> None:
    """LOAD-2, LOAD-3: with a full queue, and with all of it left unread; the thread is gone."""
    data, _ = spied(opened(root, data__prefetch=4))
    for start in range(20):
        loader = Loader(data.config, data, 0, 1, start)
        with loader:
            loader.step(start)
        assert not loader._thread.is_alive()


def test_a_late_start_reads_as_much_as_an_early_one(root: Path) -> None:
    """LOAD-3: nothing is read that is not trained on."""
    data, spy = spied(opened(root))
    counts = []
    for start in (0, 10_000):
        spy.reads = 0
        loader = Loader(data.config, data, 0, 1, start)
        batch = loader.read(start)
        assert spy.reads == sum(len(data.train.plan.sample(s)) for s in drawn([batch]))
        counts.append(len(drawn([batch])))
    assert counts == [12, 12]


def test_the_reader_stays_ahead_by_its_depth(root: Path) -> None:
    """LOAD-1: `data.prefetch` steps wait, and one more is in hand."""
    data, spy = spied(opened(root, data__prefetch=2, global_batch_size=2, data__packing="none"))
    with Loader(data.config, data, 0, 1, 0):
        deadline = time.monotonic() + 10
        while spy.reads < 6 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        assert spy.reads == 6


def test_buffers_are_pinned_where_there_is_a_gpu(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LOAD-1: every tensor of a micro-batch, and the batch is the same; on a CPU nothing is pinned."""
    data = opened(root)
    (plain,) = load(data, range(1))
    pinned: list[int] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.numel())
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for platform, count in (("cpu", 0), ("cuda", 1)):
        data.config.platform.name = platform
        assert same(Loader(data.config, data, 0, 1, 0).read(0), plain)
        tensors = [t for m in plain.micro_batches for t in vars(m).values() if isinstance(t, torch.Tensor)]
        assert sum(pinned) == count * sum(t.numel() for t in tensors)


def evaluate(data: Data, coordinates: int) -> tuple[list[list[MicroBatch]], list[int]]:
    rounds = [list(heldout_batches(data.config, data, d, coordinates)) for d in range(coordinates)]
    return rounds, [s for r in rounds for m in r for s in m.samples]


@pytest.mark.parametrize(
    ("samples", "coordinates", "size"), [(7, 4, 1), (1, 8, 1), (7, 1, 2), (7, 3, 2), (None, 2, 3)]
)
def test_each_held_out_sample_is_evaluated_once(
    root: Path, samples: int | None, coordinates: int, size: int
) -> None:
    """EVAL-1, EVAL-4: the same rounds everywhere, filled with samples that have no target."""
    data = opened(root, evaluation__samples=samples, micro_batch_size=size)
    rounds, taken = evaluate(data, coordinates)
    wanted = heldout_order(data.config, len(data.heldout))
    assert len(wanted) == (len(data.heldout) if samples is None else samples)
    assert sorted(s for s in taken if s >= 0) == sorted(wanted)
    assert {len(r) for r in rounds} == {-(-len(wanted) // (coordinates * size))}
    assert len(taken) == len(rounds) * len(rounds[0]) * size
    tokens = sum(m.target_tokens for r in rounds for m in r)
    assert tokens == sum(data.heldout.micro_batch([s]).target_tokens for s in wanted)


def test_evaluation_moves_no_training_batch(root: Path) -> None:
    """EVAL-3, the data's part."""
    data = opened(root)
    straight = load(data, range(4))
    with Loader(data.config, data, 0, 1, 0) as loader:
        for s in range(4):
            assert same(loader.step(s), straight[s])
            list(heldout_batches(data.config, data, 0, 1))


def test_synthetic_data_loads_without_a_store() -> None:
    """PREP-4."""
    data = open_data(synthetic_config("copy", global_batch_size=4, data__holdout=0.2))
    (batch,) = load(data, range(1))
    assert all(m.cu_seqlens is None for m in batch.micro_batches)
    assert batch.tokens == 4 * 64
    assert data.tokenizer is None
    assert (data.key, data.manifest) == (None, {})
