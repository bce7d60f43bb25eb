"""BENCH-1 to BENCH-4, BENCH-7: the script end to end on a CPU, and the lines that it leaves."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import bench_model, generate_docs
from src.bench import record
from src.bench.compare import check_same_start
from src.bench.lines import verdict
from tests.docs.commands import ROOT

SMALL = ["--cases", "tiny", "--blocks", "2", "--steps", "2", "--warmup", "1", "--profile"]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one run of the script appends, over a line that was there."""
    path = tmp_path_factory.mktemp("bench") / "results" / "bench_model.jsonl"
    path.parent.mkdir()
    path.write_text('{"schema": 0}\n')
    assert bench_model.main([*SMALL, "--tokens-per-step", "128", "--out", str(path)]) == 0
    first, *rest = record.read(path)
    assert first == {"schema": 0}, "old lines stay"
    return rest


@pytest.mark.slow
def test_bench_7_a_line_a_side_with_every_field(lines: list[dict[str, Any]]) -> None:
    """BENCH-7: both sides, each of the schema; the ratio stands with ours and names the peer."""
    assert [record.side(line) for line in lines] == ["native", "transformers"]
    assert [list(record.problems(line)) for line in lines] == [[], []]
    ours, peer = lines
    assert ours["case"]["tokens"] == 4 * ours["case"]["seq"] == 128
    assert ours["peer"] == {"name": "transformers", "version": peer["versions"]["transformers"]}
    assert (peer["peer"], peer["ratio"]) == (None, None)
    assert ours["ratio"]["speed"] == pytest.approx(peer["step_ms"]["median"] / ours["step_ms"]["median"])


@pytest.mark.slow
def test_bench_3_both_sides_start_alike_and_are_timed_as_often(lines: list[dict[str, Any]]) -> None:
    """BENCH-2, BENCH-3: one first loss; blocks times steps of values, whose quantiles lie in order."""
    ours, peer = lines
    assert ours["loss"]["first"] == pytest.approx(peer["loss"]["first"], abs=1e-5)
    for line in lines:
        step = line["step_ms"]
        assert len(step["all"]) == 2 * 2
        assert min(step["all"]) <= step["p10"] <= step["p90"] <= max(step["all"])
        assert line["tokens_per_s"] == pytest.approx(128e3 / step["median"])


@pytest.mark.slow
def test_bench_4_shares_are_whole(lines: list[dict[str, Any]]) -> None:
    """BENCH-4: the groups make up the time, products and head among them."""
    for line in lines:
        assert sum(line["share"].values()) == pytest.approx(1)
        assert min(line["share"]["dense"], line["share"]["head"], line["share"]["optimizer"]) > 0


@pytest.mark.slow
def test_bench_7_the_documents_table_has_a_row_a_line(
    lines: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BENCH-7: the table is made from the lines; those of an earlier schema stay in the file alone."""
    monkeypatch.setattr(generate_docs, "ROOT", tmp_path)
    record.append(tmp_path / "benchmarks/bench_model.jsonl", lines)
    with (tmp_path / "benchmarks/bench_model.jsonl").open("a") as file:
        file.write('{"schema": 0}\n')
    rows = generate_docs.benchmarks().splitlines()
    assert len(rows) == 2 + len(lines)
    assert all(f"{line['step_ms']['median']:.1f}" in row for line, row in zip(lines, rows[2:], strict=True))


@pytest.mark.slow
def test_bench_7_mutations_are_named(lines: list[dict[str, Any]]) -> None:
    """BENCH-7: a field that is missing, unknown, or of another type is found where it is."""
    wrong = copy.deepcopy(lines[0])
    del wrong["noise"]
    wrong["speed"] = 1
    wrong["case"]["routing"] = "random"
    wrong["case"]["packed"] = 1
    wrong["schema"] = True
    wrong["ratio"]["speed"] = "fast"
    assert [problem.partition(":")[0] for problem in record.problems(wrong)] == [
        *("case.packed", "case.routing", "noise", "ratio.speed", "schema", "speed")
    ]


def test_bench_7_recorded_lines_are_of_the_schema() -> None:
    """BENCH-7: every line that the repository holds; one of an earlier schema stays as it is."""
    lines = [line for path in sorted((ROOT / "benchmarks").glob("*.jsonl")) for line in record.read(path)]
    current = [line for line in lines if line["schema"] == record.SCHEMA]
    assert [problem for line in current for problem in record.problems(line)] == []


def test_bench_3_a_difference_inside_the_noise_is_none() -> None:
    """BENCH-3: A against A decides."""
    assert verdict(1.04, noise=0.05).startswith("none")
    assert verdict(0.94, noise=0.05) == "0.940"


def test_bench_3_another_first_loss_ends_the_comparison() -> None:
    """BENCH-3: sides that do not compute the same are not compared."""

    class Fake:
        def __init__(self, name: str, loss: float) -> None:
            self.name, self._loss = name, loss

        def loss(self, index: int) -> float:
            return self._loss

    check_same_start(Fake("a", 4.0), Fake("b", 4.009))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"4\.0000 \(a\) and 4\.0200 \(b\)"):
        check_same_start(Fake("a", 4.0), Fake("b", 4.02))  # type: ignore[arg-type]


def test_a_failing_comparison_is_told_and_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of one comparison is reported last, after what the others gave."""

    def explode(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory: 3 GiB")

    monkeypatch.setattr("src.bench.compare.check_same_start", explode)
    out = tmp_path / "out.jsonl"
    assert bench_model.main([*SMALL, "--out", str(out)]) == 1
    assert "failed: tiny fp32: OutOfMemoryError: out of memory: 3 GiB" in capsys.readouterr().out
    assert not out.exists()


def test_an_unknown_case_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake is a UserError's code and text, as of train.py."""
    assert bench_model.main(["--cases", "tiny,tinny"]) == 2
    assert "bench/tinny" in capsys.readouterr().err


def test_gpu_check_parses_and_says_that_there_is_no_gpu() -> None:
    """BENCH-6: without a GPU the script checks nothing and says so with 3."""
    script = str(ROOT / "scripts/gpu_check.sh")
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, "no GPU" in done.stderr) == (3, True)
    done = subprocess.run([script, "test"], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, "unknown stage" in done.stderr) == (2, True)
