"""BENCH-1 to BENCH-3, BENCH-7, PERF-5 to PERF-10: scripts that time one operation, formulas and lines."""

from __future__ import annotations

import copy
import json
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from scripts import bench_attention, bench_elementwise, bench_head, bench_moe, bench_optimizer
from src.bench import op, ops_attention, ops_elementwise, ops_head, ops_moe, ops_optimizer, record
from src.bench.clock import Ceilings
from src.bench.op import FORWARD, TRAINING, Cost, Rotation, Side, Stopwatch, Subject, measure, tensors
from src.bench.op_record import FIELDS, SCHEMA, Setting, line_of, table
from src.bench.place import Key, Place
from tests.docs.commands import ROOT

SCRIPTS = {
    "moe": bench_moe,
    "attention": bench_attention,
    "head": bench_head,
    "optimizer": bench_optimizer,
    "elementwise": bench_elementwise,
}
CPU = Place(torch.device("cpu"), torch.float32, torch.Generator().manual_seed(3))


def counted(subject: Subject, key: Key, direction: str) -> tuple[int, Cost]:
    """FLOPs of products as torch counts them, and what the formula says."""
    side = next(side for side in subject.sides if side.key == key)
    inputs = subject.make()
    with FlopCounterMode(display=False) as counter:
        side.run(direction, inputs)
    return counter.get_total_flops(), side.cost[direction]


@pytest.mark.parametrize("direction", op.DIRECTIONS)
def test_flops_are_those_of_the_products_that_run(direction: str) -> None:
    """PERF-5, PERF-7: torch's own count of the reference; a formula that forgets the up product is seen."""
    for subject in ops_moe.subjects("tiny", CPU):
        for operation in ("grouped_mm", "stages", "local_experts"):
            found, cost = counted(subject, (operation, "eager"), direction)
            assert found == cost.flops, (subject.case, operation)
            assert found != cost.flops * 2 // 3
    (head,) = ops_head.subjects("tiny", CPU)
    keys = [ops_head.PRODUCTS]
    if direction == FORWARD:  # Of three products torch does not count the one that adds in place.
        keys.append(("linear_cross_entropy", "eager"))
    for key in keys:
        found, cost = counted(head, key, direction)
        assert found == cost.flops, key


def test_attention_counts_half_of_the_scores() -> None:
    """PERF-6: the reference computes all of them; its backward has four products, a fused one five."""
    (subject,) = ops_attention.subjects("tiny", CPU)
    key = ("attention", "eager")
    (whole, forward), (both, training) = (counted(subject, key, way) for way in op.DIRECTIONS)
    assert whole == 2 * forward.flops
    assert both == 3 * whole
    assert training.flops == pytest.approx(both / 2 * 3.5 / 3)


READS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "rms_norm": (("x",), ("x",)),
    "swiglu": (("x",), ("x",)),
    "permute": (("x",), ()),
    "unpermute": (("x",), ()),
    "combine": (("y", "weights", "residual"), ("y", "weights")),
    "rotary_heads": (("q", "k", "cos", "sin"), ("q", "k", "cos", "sin")),
    "latent_heads": (("q", "kv", "k", "cos", "sin"), ("cos", "sin")),
}
"""What a pass has to read besides upstream gradients; indices are apart."""
SMALL = ("gain", "q_gain", "k_gain", "residual")
"""Leaves whose gradients count for nothing, or are the upstream gradient itself."""


@pytest.mark.parametrize("name", ["tiny", "latent"])
def test_bytes_are_those_of_the_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PERF-9: counted from the tensors that come and go, without the formula."""
    monkeypatch.setitem(ops_elementwise.HEADS, "latent", ops_elementwise.Heads(3, 3, 14, value=10, rotated=4))
    monkeypatch.setitem(ops_elementwise.LAYERS, "latent", ops_moe.SHAPES["tiny"])
    seen = set()
    for subject in ops_elementwise.subjects(name, CPU):
        side, inputs = subject.sides[0], subject.make()
        if side.key[0] not in READS:
            continue
        seen.add(side.key[0])
        first, second = READS[side.key[0]]
        index = inputs["order"].row_slot_N.nbytes if "permute" in side.key[0] else 0
        outputs = side.run(FORWARD, inputs)
        forward = (
            index + sum(inputs[read].nbytes for read in first) + sum(x.nbytes for x in tensors([outputs]))
        )
        assert side.cost[FORWARD].bytes == forward, side.key
        gradients = dict(zip(side.leaves, side.run(TRAINING, inputs), strict=True))
        upstream = sum(inputs[grad].nbytes for grad in side.grads)
        downstream = sum(grad.nbytes for leaf, grad in gradients.items() if leaf not in SMALL)
        backward = index + sum(inputs[read].nbytes for read in second) + upstream + downstream
        assert side.cost[TRAINING].bytes == forward + backward, side.key
    assert seen == set(READS) - {"latent_heads" if name == "tiny" else "rotary_heads"}


def test_bytes_of_the_update_and_of_sums() -> None:
    """PERF-8, OP-4: 28 bytes a parameter with fp32 masters and 14 in bf16; from the tensors on a CPU."""
    assert ops_optimizer.update_bytes(1, torch.float32, torch.bfloat16) == 28
    assert ops_optimizer.update_bytes(1, torch.bfloat16, torch.bfloat16) == 14
    for subject in ops_optimizer.subjects("tiny", CPU):
        inputs, operation = subject.make(), subject.sides[0].key[0]
        nbytes = {name: sum(x.nbytes for x in tensors(value)) for name, value in inputs.items()}
        expected = {
            "adamw": lambda n: 2 * (n["p"] + n["m"] + n["v"]) + n["g"] + n["copy"],
            "accumulate": lambda n: 2 * n.get("total", n["g"] / 2) + n["g"],
            "grad_norm": lambda n: n["g"],
        }[operation](nbytes)
        assert subject.sides[0].cost[FORWARD].bytes == expected, (subject.case, operation)


def test_bench_1_a_cache_forgets_a_set_before_it_comes_again() -> None:
    """BENCH-1: bytes between two uses of a set; with one set fewer there are too few."""
    rotation = Rotation(lambda: {"x": [torch.zeros(250)]}, cache=3500)
    used = [rotation.next() for _ in range(2 * len(rotation.sets))]
    assert used[0] is used[len(rotation.sets)]
    assert len({id(inputs) for inputs in used}) == len(rotation.sets)
    between = (len(rotation.sets) - 1) * rotation.size
    assert between >= 3500 > between - rotation.size
    large = Rotation(lambda: {"x": torch.zeros(2000)}, cache=3500)
    assert len(large.sets) == 2


def logged(names: str, log: list[str], fails: str = "") -> Subject:
    """Sides that say that they were called; the one that `fails` has no room."""

    def side(name: str) -> Side:
        def call(inputs: op.Inputs) -> Tensor:
            log.append(name)
            if name == fails:
                raise torch.OutOfMemoryError("no room")
            return torch.zeros(1)

        return Side(("sum", name), call, {FORWARD: Cost(bytes=8)})

    return Subject("made up", {}, lambda: {"x": torch.ones(9)}, [*map(side, names)], ("sum", "b"))


def test_bench_3_sides_take_turns() -> None:
    """BENCH-3: A B C A B C, each as often; times of as many calls as were asked for."""
    log: list[str] = []
    timings = measure(logged("abc", log), FORWARD, 2, CPU, Stopwatch(CPU.device))
    assert "".join(name for name, _ in groupby(log)) == "abc" * (1 + op.BLOCKS)
    assert [[len(block) for block in timing.blocks] for timing in timings] == [[2] * op.BLOCKS] * 3
    assert {timing.other.side.key for timing in timings if timing.other} == {("sum", "b")}


def test_bench_6_too_little_memory_is_a_result() -> None:
    """BENCH-6: the side says so, the others go on, and nothing is compared with it."""
    timings = measure(logged("ab", [], fails="b"), FORWARD, 2, CPU, Stopwatch(CPU.device))
    assert [bool(timing.blocks) for timing in timings] == [True, False]
    assert [timing.other for timing in timings] == [None, None]
    setting = Setting.of(CPU, Ceilings(gemm_tflops=1.0, copy_gbs=1.0))
    lines = [line_of(timing, setting, setting.card()) for timing in timings]
    assert [problem for line in lines for problem in record.problems(line, FIELDS)] == []
    assert [(line["outcome"], line["ms"] is None) for line in lines] == [
        *((record.MEASURED, False), (record.OUT_OF_MEMORY, True))
    ]
    assert "out of memory" in table(lines)[-1]


def test_loads_are_of_distinct_experts() -> None:
    """PERF-5: even turns, or a Dirichlet(0.5) popularity, the same for every set of inputs."""
    shape = ops_moe.Shape(16, 3, 8, tokens=640)
    loads = {}
    for load in ops_moe.LOADS:
        popularity_E = ops_moe.popularity(16, load, CPU.device)
        ids_TK = ops_moe.choose(shape, popularity_E, CPU)
        assert all(len(set(row)) == 3 for row in ids_TK.tolist())
        counts_E = ids_TK.flatten().bincount(minlength=16)
        loads[load] = float(counts_E.max() / counts_E.float().mean())
    assert loads["balanced"] == 1
    assert loads["skewed"] > 2


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


def test_bench_7_mutations_are_named(lines: dict[str, list[dict[str, Any]]]) -> None:
    """BENCH-7: a field that is missing, unknown, or of another type is found where it is."""
    wrong = copy.deepcopy(lines["moe"][0])
    del wrong["noise"]
    wrong["speed"] = 1
    wrong["direction"] = "bwd"
    wrong["ms"]["p10"] = "fast"
    wrong["flops"] = 1.5
    assert [problem.partition(":")[0] for problem in record.problems(wrong, FIELDS)] == [
        *("direction", "flops", "ms.p10", "noise", "speed")
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
    for script, more, said in (
        (bench_moe, ["--implementations", "quack"], "runs on cuda, not on cpu"),
        (bench_head, ["--implementations", "quick"], "eager, mm"),
        (bench_head, ["--cases", "tinny"], "deepseek_v2, qwen3, tiny"),
        (bench_head, ["--steps", "0"], "--steps 0"),
    ):
        assert _refused(script, [*words, *more])
        assert said in capsys.readouterr().err


def _refused(script: ModuleType, words: list[str]) -> bool:
    return bool(script.main(words) == 2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["moe", "head", "optimizer", "elementwise"])
def test_tiny_cases_run_on_a_card(name: str, tmp_path: Path) -> None:
    """BENCH-1: every implementation there, each with a time and a peak."""
    path = tmp_path / "found.jsonl"
    assert SCRIPTS[name].main(["--cases", "tiny", "--steps", "2", "--out", str(path)]) == 0
    found = record.read(path)
    assert all(line["ms"]["median"] > 0 and line["peak_gib"] is not None for line in found)
    assert {line["implementation"] for line in found} > {"eager"}


@pytest.mark.gpu
def test_bench_2_the_host_is_ahead_of_what_is_timed() -> None:
    """BENCH-2: a copy of 1 MB takes microseconds on the card, far less than the host takes to ask for it."""
    device = torch.device("cuda", 0)
    source = torch.randn(1 << 18, device=device)
    target = torch.empty_like(source)

    def call() -> None:
        for _ in range(20):
            target.copy_(source)

    watch = Stopwatch(device)
    issued, _ = watch.warm(call, 10)
    assert sum(watch.block(call, 10, issued)) < issued
