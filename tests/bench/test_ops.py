"""BENCH-1 to BENCH-3, BENCH-6, BENCH-7: scripts that time one operation, their engine and their lines."""

from __future__ import annotations

import copy
import json
import time
from dataclasses import replace
from functools import partial, partialmethod
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts import (
    bench_attention,
    bench_elementwise,
    bench_head,
    bench_moe,
    bench_optimizer,
    generate_docs,
)
from src.bench import op, op_shapes, ops_attention, ops_elementwise, ops_moe, record
from src.bench.clock import Ceilings
from src.bench.op import FORWARD, TRAINING, Cost, Side, Subject, measure
from src.bench.op_record import FIELDS, SCHEMA, Setting, line_of, newest, table
from src.bench.op_script import FORMS, Session
from src.bench.place import Place
from src.bench.stopwatch import Inputs, Rotation, Stopwatch
from tests.docs.commands import ROOT

SCRIPTS = {
    "moe": bench_moe,
    "attention": bench_attention,
    "head": bench_head,
    "optimizer": bench_optimizer,
    "elementwise": bench_elementwise,
}
CPU = Place(torch.device("cpu"), torch.float32, torch.Generator().manual_seed(3))


def test_bench_1_a_cache_forgets_a_set_before_it_comes_again() -> None:
    """BENCH-1: bytes between two uses of a set; with one set fewer there are too few."""
    rotation = Rotation(lambda: {"x": [torch.zeros(250)]}, cache=3500)
    used = [rotation.turn() for _ in range(2 * len(rotation.sets))]
    assert used[0] is used[len(rotation.sets)]
    assert len({id(inputs) for inputs in used}) == len(rotation.sets)
    between = (len(rotation.sets) - 1) * rotation.size
    assert between >= 3500 > between - rotation.size
    large = Rotation(lambda: {"x": torch.zeros(2000)}, cache=3500)
    assert len(large.sets) == 2


def test_memory_of_a_result_is_what_no_input_has() -> None:
    """PERF-7: views of inputs are not counted, views of one result once."""
    rotation = Rotation(lambda: {"x": torch.zeros(10), "deep": [torch.zeros(3)]}, cache=1)
    inputs, fresh = rotation.turn(), torch.zeros(7)
    assert rotation.fresh_bytes((inputs["x"][2:], inputs["deep"][0], fresh[1:], fresh, None)) == 28
    assert rotation.fresh_bytes(None) == 0


def logged(names: str, log: list[str], fails: str = "", error: type[Exception] = ValueError) -> Subject:
    """Sides that say that they were called; the one that `fails` raises the error."""

    def side(name: str) -> Side:
        def call(inputs: Inputs) -> Tensor:
            log.append(name)
            if name == fails:
                raise error("no room")
            return torch.zeros(1)

        def reset(inputs: Inputs) -> None:
            log.append(name.upper())

        return Side(("sum", name), call, {FORWARD: Cost(bytes=8)}, reset=reset)

    return Subject("made up", {}, lambda: {"x": torch.ones(9)}, [*map(side, names)], ("sum", "b"))


def test_bench_3_sides_take_turns() -> None:
    """BENCH-3: A B C A B C, each as often; times of as many calls as were asked for."""
    log: list[str] = []
    timings = measure(logged("abc", log), FORWARD, 2, CPU, Stopwatch(CPU.device))
    assert "".join(name for name, _ in groupby(map(str.lower, log))) == "abc" * (1 + op.BLOCKS)
    assert "".join(log).replace("Aa", "").replace("Bb", "").replace("Cc", "") == "", "each call is prepared"
    assert [[len(block) for block in timing.blocks] for timing in timings] == [[2] * op.BLOCKS] * 3
    assert {timing.other.side.key for timing in timings if timing.other} == {("sum", "b")}


def test_what_prepares_a_call_is_not_timed() -> None:
    """BENCH-2: inputs that a call has written over are made anew on nobody's clock."""
    times = Stopwatch(CPU.device).block(lambda: time.sleep(0.02), lambda: None, 3, 0.0)
    assert len(times) == 3
    assert max(times) < 20


def test_an_error_of_one_side_leaves_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """BENCH-1: it is named last and the exit code says so; it has no line."""
    session = Session(CPU, 1, tmp_path / "out.jsonl")
    assert session.measure([logged("abc", [], fails="c")], op.DIRECTIONS) == 1
    assert [line["implementation"] for line in record.read(tmp_path / "out.jsonl")] == ["a", "b"]
    assert capsys.readouterr().out.splitlines()[-1] == "failed: made up fwd sum=c: ValueError: no room"


def test_bench_6_too_little_memory_is_a_result() -> None:
    """BENCH-6: the side says so, the others go on, and nothing is compared with it."""
    subject = logged("ab", [], fails="b", error=torch.OutOfMemoryError)
    timings = measure(subject, FORWARD, 2, CPU, Stopwatch(CPU.device))
    assert [bool(timing.blocks) for timing in timings] == [True, False]
    assert [timing.other for timing in timings] == [None, None]
    setting = Setting.of(CPU, Ceilings(gemm_tflops=1.0, copy_gbs=1.0))
    lines = [line_of(timing, setting, setting.card()) for timing in timings]
    assert [problem for line in lines for problem in record.problems(line, FIELDS)] == []
    assert [(line["outcome"], line["ms"] is None) for line in lines] == [
        *((record.MEASURED, False), (record.OUT_OF_MEMORY, True))
    ]
    assert "out of memory" in table(lines)[-1]


def test_bench_6_no_room_for_inputs_is_a_result_too() -> None:
    """BENCH-6: of every side."""

    def make() -> Inputs:
        raise torch.OutOfMemoryError("no room")

    subject = replace(logged("ab", []), make=make)
    timings = measure(subject, FORWARD, 2, CPU, Stopwatch(CPU.device))
    assert [(timing.blocks, timing.error) for timing in timings] == [([], None)] * 2


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each script leaves of its tiny case."""
    found = {}
    for name, script in SCRIPTS.items():
        path = tmp_path_factory.mktemp("ops") / "new" / f"bench_{name}.jsonl"
        assert script.main(["--cases", "tiny", "--steps", "1", "--out", str(path)]) == 0, name
        found[name] = record.read(path)
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_bench_7_lines_of_every_script(name: str, lines: dict[str, list[dict[str, Any]]]) -> None:
    """BENCH-7: each line has every field; the ratio is of the two times; the table has a row for each."""
    mine = lines[name]
    assert [problem for line in mine for problem in record.problems(line, FIELDS)] == []
    names = ("direction", "operation", "implementation")
    by_key = {(line["case"]["name"], *(line[name] for name in names)): line for line in mine}
    assert len(by_key) == len(mine)
    for line in mine:
        ms, other = line["ms"], line["other"]
        assert line["outcome"] == record.MEASURED
        assert len(ms["blocks"]) == op.BLOCKS
        key = (line["case"]["name"], line["direction"], other["operation"], other["implementation"])
        assert line["ratio"] == pytest.approx(ms["median"] / by_key[key]["ms"]["median"])
    assert {line["direction"] for line in mine} == {FORWARD, TRAINING} - (
        {TRAINING} if name == "optimizer" else set()
    )
    assert len(table(mine)) == 1 + len(mine)
    operations = {(line["case"]["name"], line["operation"]) for line in mine}
    chosen = {(line["case"]["name"], line["operation"]) for line in mine if line["auto"]}
    assert operations - chosen <= {("tiny", "products")}, "of each operation one is what auto takes"


def test_bench_7_the_documents_table_has_the_newest(
    lines: dict[str, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BENCH-7: one row a case, operation, implementation and direction, of the last measurement."""
    monkeypatch.setattr(generate_docs, "ROOT", tmp_path)
    assert generate_docs.operations() == generate_docs.NOTHING
    head = lines["head"]
    again = copy.deepcopy(head[0])
    again["ms"]["median"] = 77.125
    record.append(tmp_path / "benchmarks/bench_head.jsonl", [*head, again], FIELDS)
    with (tmp_path / "benchmarks/bench_head.jsonl").open("a") as file:
        file.write('{"schema": 0}\n')
    rows = [row for row in generate_docs.operations().splitlines() if row.startswith("| 20")]
    assert len(rows) == len(newest([*head, again])) == len(head)
    assert "77.1250" in rows[0]


def test_bench_7_mutations_are_named(lines: dict[str, list[dict[str, Any]]]) -> None:
    """BENCH-7: a field that is missing, unknown, or of another type is found where it is."""
    wrong = copy.deepcopy(lines["moe"][0])
    del wrong["noise"]
    wrong["speed"] = 1
    wrong["direction"] = "bwd"
    wrong["ms"]["p10"] = "fast"
    wrong["flops"] = 1.5
    wrong["auto"] = 1
    assert [problem.partition(":")[0] for problem in record.problems(wrong, FIELDS)] == [
        *("auto", "direction", "flops", "ms.p10", "noise", "speed")
    ]


def test_bench_7_recorded_lines_are_of_the_schema() -> None:
    """BENCH-7: every line that the repository holds of these scripts."""
    paths = [ROOT / f"benchmarks/bench_{name}.jsonl" for name in SCRIPTS]
    found = [line for path in paths if path.is_file() for line in record.read(path)]
    current = [line for line in found if line["schema"] == SCHEMA]
    assert [problem for line in current for problem in record.problems(line, FIELDS)] == []


def test_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """BENCH-1: one implementation keeps what it is compared with; what is not here is refused, and why."""
    path = tmp_path / "found.jsonl"
    words = ["--cases", "tiny", "--steps", "1", "--out", str(path), "--direction", FORWARD]
    assert bench_elementwise.main([*words, "--implementations", "real"]) == 0
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["operation"], line["implementation"]) for line in found] == [
        *(("rotary_heads", "real"), ("rotary_heads", "eager"))
    ]
    path.unlink()
    assert bench_moe.main([*words, "--implementations", "auto", "--tokens", "25"]) == 0
    layers = [
        line for line in map(json.loads, path.read_text().splitlines()) if line["case"]["name"] != "tiny part"
    ]
    assert {line["implementation"] for line in layers} == {"auto", "torch_grouped_mm"}
    assert {line["flops"] for line in layers} == {2 * 25 * 2 * 3 * 16 * 24}
    for script, more, said in (
        (bench_moe, ["--implementations", "quack"], "runs on cuda, not on cpu"),
        (bench_head, ["--implementations", "quick"], "eager, mm"),
        (bench_head, ["--cases", "tinny"], "deepseek_v2, qwen3, tiny"),
        (
            bench_head,
            ["--steps", "0", "--tokens", "0"],
            "--steps 0: a block has one call at least\n--tokens 0",
        ),
        (bench_attention, ["--tokens", "41"], "samples have 40"),
    ):
        assert _refused(script, [*words, *more])
        assert said in capsys.readouterr().err


def _refused(script: ModuleType, words: list[str]) -> bool:
    return bool(script.main(words) == 2)


class Compiled(Place):
    """A CPU that compiles as training does on a GPU."""

    compiles = True  # type: ignore[assignment]


@pytest.mark.slow
def test_cmp_2_what_training_compiles_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """CMP-2: layers and plain torch compile whole, with as many graphs for two sets of inputs as for one."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(
        torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="aot_eager")
    )
    where = Compiled(CPU.device, CPU.dtype, CPU.draws)
    subjects = [
        *ops_moe.subjects("tiny", op_shapes.SHAPES["tiny"], where)[1:],
        *ops_elementwise.subjects("tiny", ops_elementwise.SHAPES["tiny"], where)[-2:],
        *ops_attention.subjects("tiny_packed", ops_attention.SHAPES["tiny_packed"], where),
    ]
    graphs = [0, 0]
    inputs = [[subject.make() for subject in subjects] for _ in graphs]
    with torch._dynamo.config.patch(recompile_limit=FORMS):
        for index, sets in enumerate(inputs):
            for subject, one in zip(subjects, sets, strict=True):
                for side, direction in ((s, d) for d in op.DIRECTIONS for s in subject.of(d)):
                    side.run(direction, one)
            graphs[index] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs[1] == graphs[0] > 0
    assert any(side.is_compiled for subject in subjects for side in subject.sides)
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCRIPTS)
def test_tiny_cases_run_on_a_card(name: str, tmp_path: Path) -> None:
    """BENCH-1: every implementation there, each with a time, its memory and its launches."""
    path = tmp_path / "found.jsonl"
    cases = "tiny,tiny_biased" if name == "moe" else "tiny,tiny_packed" if name == "attention" else "tiny"
    assert SCRIPTS[name].main(["--cases", cases, "--steps", "2", "--out", str(path)]) == 0
    found = record.read(path)
    assert all(line["ms"]["median"] > 0 and line["extra_gib"] is not None for line in found)
    assert all(line["launches"] > 0 for line in found)
    assert {line["implementation"] for line in found} > {"eager"}


@pytest.mark.gpu
def test_bench_2_the_host_is_ahead_of_what_is_timed() -> None:
    """BENCH-2: a copy of 1 MB takes microseconds on the card, far less than the host takes to ask for it."""
    device = torch.device("cuda", 0)
    rotation = Rotation(lambda: {"x": torch.randn(1 << 18, device=device)}, 1)
    target = torch.empty(1 << 18, device=device)

    def call() -> torch.Tensor:
        for _ in range(20):
            target.copy_(rotation.now["x"])
        return target.new_empty(1 << 20)

    watch = Stopwatch(device)
    warm = watch.warm(rotation.turn, call, 10, rotation)
    assert (warm.launches, warm.extra_bytes) == (20, 0)
    assert sum(watch.block(rotation.turn, call, 10, warm.issued_ms)) < warm.issued_ms
