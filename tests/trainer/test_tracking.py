"""A tracker that raises, hangs or sleeps neither stops nor slows training (TRACK-1, TRACK-2)."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from src.config import Config
from src.trainer.callbacks import tracking
from src.trainer.callbacks.tracking import Tracking, run_id

LINE: dict[str, Any] = {"schema": 1, "step": 3, "loss": 2.5, "time": 1.0, "aux_loss": None, "moe": None}


class Stub:
    """Records its calls; `bad` names the call that raises, `hang` the one that never returns."""

    def __init__(self, bad: str = "", hang: str = "") -> None:
        self.calls: list[tuple[str, Any]] = []
        self.bad, self.hang = bad, hang
        self.release = threading.Event()

    def _call(self, name: str, value: Any) -> None:
        self.calls.append((name, value))
        if name == self.bad:
            raise RuntimeError("the service is down")
        if name == self.hang:
            self.release.wait(20)

    def init(self, config: dict[str, Any]) -> None:
        self._call("init", config)

    def log(self, step: int, values: dict[str, Any]) -> None:
        self._call("log", (step, values))

    def finish(self) -> None:
        self._call("finish", None)


def drive(stub: Stub, lines: int = 3) -> float:
    run: Any = SimpleNamespace(
        config=Config(), data=SimpleNamespace(key="k"), runtime=SimpleNamespace(rank=0)
    )
    callback = Tracking("stub", stub)
    started = time.perf_counter()
    callback.start(run)
    for step in range(lines):
        callback.metrics(run, [LINE | {"step": step}])
    callback.evaluated(run, {"step": 9, "loss": 1.0, "bits_per_byte": None}, [])
    callback.close(run)
    return time.perf_counter() - started


def test_one_init_plain_values_in_order_one_finish() -> None:
    stub = Stub()
    drive(stub)
    names = [name for name, _ in stub.calls]
    assert names == ["init", "log", "log", "log", "log", "finish"]
    config = stub.calls[0][1]
    assert config["optimizer.lr"] == Config().optimizer.lr
    assert all(isinstance(v, int | float | str | bool | list | dict | None) for v in config.values())
    assert stub.calls[1][1] == (0, {"train/loss": 2.5})
    assert stub.calls[4][1] == (9, {"heldout/loss": 1.0})


@pytest.mark.parametrize("bad", ["init", "log", "finish"])
def test_a_raising_tracker_is_one_warning(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    drive(Stub(bad=bad))
    assert capsys.readouterr().out.count("warning: stub is off for this run: RuntimeError") == 1


@pytest.mark.parametrize("hang", ["init", "log", "finish"])
def test_a_hanging_tracker_holds_nothing_up(
    hang: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracking, "FINISH_SECONDS", 0.3)
    monkeypatch.setattr(tracking, "QUEUE_SIZE", 5)
    stub = Stub(hang=hang)
    assert drive(stub, lines=20) < 5.0
    stub.release.set()
    text = capsys.readouterr().out
    assert "did not finish in" in text
    assert hang == "finish" or "records were dropped" in text


def test_run_id_is_a_function_of_sweep_and_run(tmp_path: Path) -> None:
    """TRACK-2: a resume keeps its id; two runs of a sweep differ."""
    assert run_id(tmp_path / "sweep" / "a") == run_id(Path("/elsewhere/sweep/a"))
    assert run_id(tmp_path / "sweep" / "a") != run_id(tmp_path / "sweep" / "b")
