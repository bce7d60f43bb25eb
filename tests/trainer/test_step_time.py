"""LOG-5: what a step's time is."""

from __future__ import annotations

import time

import pytest
import torch

from src.trainer.step_time import StepTime


def test_a_cpu_step_takes_as_long_as_the_host_says() -> None:
    taken = StepTime(torch.device("cpu"))
    time.sleep(0.02)
    taken.stop()
    first = taken.seconds
    time.sleep(0.02)
    assert first >= 0.02
    assert taken.seconds == first


def test_an_unfinished_step_has_no_time() -> None:
    with pytest.raises(AssertionError, match="not been stopped"):
        _ = StepTime(torch.device("cpu")).seconds


class Event:
    """An event of a device on which every mark lies 150 ms behind the one before."""

    made: list[Event] = []  # noqa: RUF012

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at: int | None = None

    def record(self) -> None:
        Event.made.append(self)
        self.at = len(Event.made)

    def synchronize(self) -> None:
        assert self.at is not None

    def elapsed_time(self, end: Event) -> float:
        assert self.at is not None
        assert end.at is not None
        return 150.0 * (end.at - self.at)


def test_a_gpu_step_is_timed_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is through at once and ahead by a step; each still takes what lies between its own marks."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    steps = []
    for _ in range(2):
        steps.append(StepTime(torch.device("cuda")))
        steps[-1].stop()
    assert [step.seconds for step in steps] == [0.15, 0.15]


@pytest.mark.gpu
def test_the_device_says_how_long_it_worked() -> None:
    a = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    begun = time.perf_counter()
    taken = StepTime(a.device)
    for _ in range(20):
        a = a @ a
    taken.stop()
    queued = time.perf_counter() - begun
    torch.cuda.synchronize()
    assert queued < taken.seconds <= time.perf_counter() - begun
