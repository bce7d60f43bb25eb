"""PROF-1 to PROF-3, BENCH-5: what tracing writes, and what is read from it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import profile_report
from src.bench.groups import GROUPS
from src.bench.trace import own_times, read, report
from src.config import LoggerConfig, ProfileConfig
from src.errors import UserError
from src.trainer.callbacks.profiling import END, Profiling
from src.trainer.loop import make_callbacks
from tests.trainer.small import lines, run_here, small_config
from tests.trainer.test_gpu import config_of

TRACE = "profile/rank_00000.trace.json.gz"


def complete(name: str, cat: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def launched(
    name: str, number: int, asked: float, ts: float, dur: float, **args: Any
) -> list[dict[str, Any]]:
    """A kernel or a copy, and the host's call for it."""
    cat = "gpu_memcpy" if "Memcpy" in name else "kernel"
    return [
        complete("cudaLaunchKernel", "cuda_runtime", asked, 1, correlation=number),
        complete(name, cat, ts, dur, correlation=number, **args),
    ]


FACTS = {"first": 5, "last": 6, "logging": [6], "device": "cuda", "vocabulary": 97}
EVENTS = [
    complete("ProfilerStep#1", "user_annotation", 100, 90),
    complete("ProfilerStep#2", "user_annotation", 200, 90),
    complete("ProfilerStep#1", "gpu_user_annotation", 150, 90),
    *launched("before_the_window", 1, asked=90, ts=95, dur=5),
    complete("aten::mm", "cpu_op", 110, 5, **{"External id": 7, "Input Dims": [[32, 64], [64, 97]]}),
    complete("aten::mm", "cpu_op", 120, 5, **{"External id": 8, "Input Dims": [[32, 64], [64, 24]]}),
    *launched("nvjet_a", 2, asked=111, ts=160, dur=30, **{"External id": 7}),
    *launched("nvjet_a", 3, asked=121, ts=190, dur=10, **{"External id": 8}),
    *launched("flash_b", 4, asked=185, ts=205, dur=20),
    *launched("Memcpy DtoH (Device -> Pinned)", 5, asked=220, ts=240, dur=2),
    complete("cudaStreamSynchronize", "cuda_runtime", 225, 20),
    complete(END, "user_annotation", 280, 5),
    complete("cudaDeviceSynchronize", "cuda_runtime", 281, 3),
    {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 111, "tid": 1},
]


def test_bench_5_steps_of_a_made_up_trace() -> None:
    """BENCH-5: a kernel belongs to the step whose host asked for it; waiting at the end is the tracer's."""
    five, six = report(EVENTS, FACTS).steps
    assert (five.number, five.logs, five.launches, five.waits, five.copies) == (5, False, 3, {}, 0)
    assert (six.number, six.logs, six.launches, six.copies) == (6, True, 1, 1)
    assert six.waits == {"cudaStreamSynchronize": 1}


@pytest.mark.parametrize(
    ("extra", "waits", "copies"),
    [
        (complete("cudaDeviceSynchronize", "cuda_runtime", 130, 1), 1, 0),
        (complete("cudaMemcpy", "cuda_runtime", 130, 1), 1, 0),
        (complete("cudaMemcpyAsync", "cuda_runtime", 130, 1), 0, 0),
        (complete("cudaEventRecord", "cuda_runtime", 130, 1), 0, 0),
        (complete("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", 130, 1), 0, 1),
        (complete("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 130, 1), 0, 0),
    ],
)
def test_bench_5_what_waits_is_seen(extra: dict[str, Any], waits: int, copies: int) -> None:
    """BENCH-5: in a step that does not log one wait or copy is a finding; other calls are none."""
    five = report([*EVENTS, extra], FACTS).steps[0]
    assert (sum(five.waits.values()), five.copies) == (waits, copies)


def test_bench_4_groups_of_a_made_up_trace() -> None:
    """BENCH-4: a product of the vocabulary is the head's, the same kernel's other run is not."""
    share = report(EVENTS[:-1], {**FACTS, "first": 5}).profile.share
    took = {"head": 30, "dense": 10, "attention": 20, "other": 5 + 2}
    busy = sum(took.values())
    assert {group for group in GROUPS if share[group]} == {*took, "idle"}
    for group, time in took.items():
        assert share[group] == pytest.approx(time / (242 - 95)), group
    assert share["idle"] == pytest.approx(1 - busy / (242 - 95))


def test_own_times_leave_out_what_was_called() -> None:
    """BENCH-4: on a CPU an operation's time is without those inside it, thread by thread."""
    events = [
        complete("aten::linear", "cpu_op", 0, 10),
        complete("aten::t", "cpu_op", 1, 2),
        complete("aten::mm", "cpu_op", 4, 5),
        complete("aten::add", "cpu_op", 10, 3),
        complete("aten::other", "cpu_op", 2, 3, tid=2),
    ]
    own = {span.name: span.end - span.start for span in own_times(events)}
    assert own == {"aten::linear": 3, "aten::t": 2, "aten::mm": 5, "aten::add": 3, "aten::other": 3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that traces its steps 3 and 4, and the same without."""
    root = tmp_path_factory.mktemp("traced")
    options = {"max_steps": 6, "logger": LoggerConfig(flush_every=4)}
    run_here(small_config(root, profile=ProfileConfig(steps=[3, 4]), **options), root / "traced")
    run_here(small_config(root, **options), root / "plain")
    return root


@pytest.mark.slow
def test_prof_1_a_window_is_traced_and_marked(runs: Path) -> None:
    """PROF-1, LOG-4: one file; the steps of the window and next to it are marked and have no speed."""
    assert [path.name for path in (runs / "traced/profile").iterdir()] == [Path(TRACE).name]
    found = read(runs / "traced" / TRACE)
    table = "\n".join(found.lines(3))
    assert all(name in table for name, *_ in found.profile.kernels[:3])
    assert f"{found.profile.share['dense']:.1%}" in table
    assert [(step.number, step.logs) for step in found.steps] == [(3, False), (4, True)]
    assert min(step.launches for step in found.steps) > 100
    assert found.profile.share["dense"] > 0 < found.profile.share["head"]
    assert sum(found.profile.share.values()) == pytest.approx(1)
    marked = [
        (line["step"], line["profiled"], line["tokens_per_s"] is None) for line in lines(runs / "traced")
    ]
    assert marked[2:] == [(s, s < 6, s < 6) for s in range(3, 7)]


def test_prof_2_tracing_changes_no_bit_and_nothing_is_there_without(runs: Path) -> None:
    """PROF-2: losses are those of the run that traces nothing, which has neither callback nor directory."""
    traced, plain = ([line["loss"] for line in lines(runs / name)] for name in ("traced", "plain"))
    assert traced == plain
    assert not (runs / "plain/profile").exists()
    assert not any(line["profiled"] for line in lines(runs / "plain"))


def test_prof_3_the_script_prints_one_object(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PROF-3: groups, kernels and a row a step as JSON; the table is made of the same."""
    assert profile_report.main([str(runs / "traced"), "--json", "--kernels", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["share"]) == set(GROUPS)
    assert len(found["kernels"]) == 3
    assert [step["number"] for step in found["steps"]] == [3, 4]


def test_prof_3_what_is_no_trace_is_told(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PROF-3: no trace, or one that something else wrote, ends with 2 and what to type."""
    assert profile_report.main([str(runs / "plain")]) == 2
    assert "profile.steps=[20,22]" in capsys.readouterr().err
    (tmp_path / "profile").mkdir()
    with gzip.open(tmp_path / TRACE, "wt") as file:
        json.dump({"traceEvents": []}, file)
    assert profile_report.main([str(tmp_path)]) == 2
    assert "was not written by profile.steps" in capsys.readouterr().err


def test_prof_1_a_stop_inside_the_window_leaves_no_half_trace(tmp_path: Path) -> None:
    """PROF-1: complete or absent; the attempt after it says that the window is over."""
    config = small_config(tmp_path, profile=ProfileConfig(steps=[2, 6]))
    assert run_here(config, tmp_path / "run", stop_after=3)
    assert not list((tmp_path / "run").glob("profile/*"))


def test_bench_4_memory_history_wants_a_gpu() -> None:
    """BENCH-4: refused where the allocator keeps none, with a sentence."""
    config = small_config(Path(), profile=ProfileConfig(steps=[1, 2], memory=True))
    with pytest.raises(UserError, match="keeps no history") as caught:
        Profiling(config, torch.device("cpu"))
    assert caught.value.code == 3


def test_prof_1_only_the_chosen_ranks_trace() -> None:
    """PROF-1: rank 0 if nothing else is said, all of them for an empty list."""

    class Fake:
        """A run as far as callbacks look at it before it starts."""

        def __init__(self, rank: int, ranks: list[int]) -> None:
            self.config = small_config(Path(), profile=ProfileConfig(steps=[1, 2], ranks=ranks))
            self.runtime = type("R", (), {"rank": rank, "world": 2, "device": torch.device("cpu")})()

    def traces(rank: int, ranks: list[int]) -> bool:
        found: Any = Fake(rank, ranks)
        return any(isinstance(callback, Profiling) for callback in make_callbacks(found))

    assert [traces(0, [0]), traces(1, [0]), traces(0, [1]), traces(1, [1])] == [True, False, False, True]
    assert [traces(0, []), traces(1, [])] == [True, True]


@pytest.mark.gpu
def test_prof_1_a_trace_of_a_gpu_has_kernels_and_history(tmp_path: Path) -> None:
    """PROF-1, BENCH-4, BENCH-5: kernels in groups, no wait for a step under way, the allocator's history."""
    torch._dynamo.reset()
    options = {"max_steps": 14, "logger": LoggerConfig(flush_every=14)}
    # Samples with and without pads are compiled apart, by step 10 both.
    config = config_of(tmp_path, "master", profile=ProfileConfig(steps=[12, 13], memory=True), **options)
    run_here(config, tmp_path / "run")
    found = read(tmp_path / "run" / TRACE)
    assert found.device == "cuda"
    assert found.profile.share["dense"] > 0 < found.profile.share["optimizer"]
    answer = {"cudaEventSynchronize": 1}  # Of the step before: whether to stop.
    assert [(dict(step.waits), step.copies) for step in found.steps] == [(answer, 1)] * 2, found.steps
    assert (tmp_path / "run/profile/rank_00000.memory.pickle").stat().st_size > 1000
