"""BENCH-1 to BENCH-4, BENCH-7: the script end to end on a CPU, and the lines that it leaves."""

from __future__ import annotations

import copy
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import bench_model, generate_docs
from src.bench import record
from src.bench.cases import groups_of, split_overrides
from src.bench.compare import check_same_start
from src.bench.side import Side
from src.bench.table import newest_rows, verdict
from src.code_identity import CodeRecord, code_record
from src.compose import compose
from src.models.counts import flops_per_token
from src.trainer.data.corpus import open_data
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
    assert [line["engine"] for line in lines] == ["native", "transformers"]
    assert [list(record.problems(line)) for line in lines] == [[], []]
    ours, peer = lines
    assert ours["case"]["tokens"] == 4 * ours["case"]["seq"] == 128
    version = peer["versions"]["transformers"]
    assert ours["peer"] == {"name": "transformers", "version": version, "compile": "none"}
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
    lines = record.read(ROOT / "benchmarks/bench_model.jsonl")
    current = [line for line in lines if line["schema"] == record.SCHEMA]
    assert [problem for line in current for problem in record.problems(line)] == []


def test_bench_7_old_lines_are_read_as_new_ones() -> None:
    """BENCH-7: those of schema 1 stay as they are and have, once read, all that is known of a line."""
    path = ROOT / "benchmarks/bench_model.jsonl"
    old = [line for line in record.read(path) if line["schema"] == 1]
    new = record.read_current(path)[: len(old)]
    assert len(old) == 14
    assert [problem for line in new for problem in record.problems(line)] == []
    assert [line["step_ms"] for line in new] == [line["step_ms"] for line in old]
    assert [line["peer"]["compile"] for line in new if line["peer"]] == [
        *("layers", "layers", "layers", "layers", "model", "model", "model")
    ]
    broken = copy.deepcopy(new[0])
    del broken["outcome"]
    assert list(record.problems(broken)) == ["outcome: missing"]


def test_bench_7_the_readme_has_the_newest_of_each_comparison() -> None:
    """BENCH-7: one row a model, tokens, routing, precision and form of the peer; the last measured counts."""
    lines = record.read_current(ROOT / "benchmarks/bench_model.jsonl")[:14]
    rows = newest_rows(lines)
    assert len(rows) == 7, "each of these was measured once"
    again = copy.deepcopy(lines[0])
    again["tokens_per_s"] = 99_999.0
    assert len(newest_rows([*lines, again])) == 7
    assert [row[4] for row in newest_rows([*lines, again]) if row[4] == "99,999"] == ["99,999"]
    other = copy.deepcopy(again)
    other["case"]["routing"] = "even"
    assert len(newest_rows([*lines, other])) == 8
    without = {**copy.deepcopy(other), "outcome": record.OUT_OF_MEMORY}
    without |= dict.fromkeys(("step_ms", "tokens_per_s", "peer", "ratio", "mfu_datasheet", "noise"))
    assert [row[4] for row in newest_rows([without])] == ["out of memory"]
    assert [row[4] for row in newest_rows([without, other])] == ["99,999"], "there is room now"


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


FEW = ["--cases", "tiny", "--blocks", "1", "--steps", "1", "--warmup", "1", "--peer", "eager"]


def test_a_failing_comparison_is_told_and_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of one comparison is reported last, after what the others gave."""

    def explode(*_: object) -> None:
        raise RuntimeError("a kernel went wrong")

    monkeypatch.setattr("src.bench.compare.check_same_start", explode)
    out = tmp_path / "out.jsonl"
    assert bench_model.main([*FEW, "--out", str(out)]) == 1
    assert "failed: tiny fp32: RuntimeError: a kernel went wrong" in capsys.readouterr().out
    assert not out.exists()


@pytest.mark.parametrize("who", ["native", pytest.param("eager", marks=pytest.mark.slow)])
def test_bench_6_out_of_memory_is_a_result(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """BENCH-6: a line of the schema says so, with exit code 0, and a peer without room leaves ours alone."""
    warm = Side.warm

    def full(side: Side, steps: int) -> None:
        if side.name == who:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        warm(side, steps)

    monkeypatch.setattr(Side, "warm", full)
    out = tmp_path / "out.jsonl"
    assert bench_model.main([*FEW, "--out", str(out)]) == 0
    found = record.read(out)
    assert [problem for line in found for problem in record.problems(line)] == []
    full_up, measured = record.OUT_OF_MEMORY, record.MEASURED
    told = [(line["engine"], line["outcome"]) for line in found]
    alone = [("eager", full_up), ("native", measured)]
    assert told == ([("native", full_up)] if who == "native" else alone)
    assert "out of memory" in capsys.readouterr().out


@pytest.mark.slow
def test_bench_1_what_was_measured_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """BENCH-1: by case, commit, versions and code, whatever the command; asked for again it is measured."""
    out = tmp_path / "out.jsonl"

    def lines_after(*words: str) -> int:
        assert bench_model.main([*FEW, "--peer", "none", "--out", str(out), *words]) == 0
        return len(record.read(out))

    assert lines_after("--tokens-per-step", "64,128") == 2
    assert lines_after("--tokens-per-step", "128,96", "--routing", "learned") == 3, "only 96 is new"
    assert "skipped; --again measures anew" in capsys.readouterr().out
    assert lines_after("--tokens-per-step", "64", "--steps", "2") == 4, "more steps than were timed"
    assert lines_after("--tokens-per-step", "96", "--again") == 5
    monkeypatch.setattr("src.bench.facts.code_record", changed_code)
    assert lines_after("--tokens-per-step", "64") == 6, "another commit"


def changed_code() -> CodeRecord:
    return replace(code_record(), commit="0" * 40)


@pytest.mark.slow
def test_bench_1_eager_is_a_peer_and_routing_is_forced_on_both(tmp_path: Path) -> None:
    """BENCH-1, DET-4: our own reference kernels beside `auto`; both sides route evenly and start alike."""
    out = tmp_path / "out.jsonl"
    words = ["--routing", "even", "--ours", "kernels.grouped_mm=eager", "--out", str(out)]
    assert bench_model.main([*FEW, *words]) == 0
    ours, eager = record.read(out)
    chosen = [line["kernels"]["operations"]["attention"]["choice"] for line in (ours, eager)]
    assert chosen[0] != "eager" == chosen[1]
    assert ours["kernels"]["operations"]["grouped_mm"]["choice"] == "eager"
    assert (ours["comparison"]["ours"], ours["case"]["routing"]) == (["kernels.grouped_mm=eager"], "even")
    assert ours["case"]["clip"] == eager["case"]["clip"] is not None
    loads = [line["case"]["load_max_over_mean"] for line in (ours, eager)]
    assert loads == [pytest.approx(1, abs=0.1)] * 2


@pytest.mark.slow
def test_bench_6_packed_flops_are_counted_by_document(tmp_path: Path) -> None:
    """PERF-6: keys of the own document alone, beside what a sample that is one document would take."""
    out = tmp_path / "out.jsonl"
    assert bench_model.main([*FEW, "--cases", "tiny_packed,tiny", "--peer", "none", "--out", str(out)]) == 0
    packed, dense = record.read(out)
    assert (packed["case"]["packed"], dense["case"]["packed"]) == (True, False)
    assert dense["flops_per_token"] == dense["flops_per_token_by_position"]
    assert packed["flops_per_token_by_position"] == dense["flops_per_token"]
    config = compose(["experiment=bench/tiny_packed"]).config
    sizes = [int(n) for n in open_data(config).train.plan.pieces[:, 2]]
    length = sum(n * n for n in sizes) / sum(sizes)
    assert 9 < length < 18, "weighed by tokens, documents of 9 in the mean are longer"
    assert packed["flops_per_token"] == flops_per_token(config.model, round(length))
    assert packed["tokens_per_s"] < 1e3 * 64 / packed["step_ms"]["median"], "pads are no tokens"


@pytest.mark.slow
def test_bench_6_a_model_without_experts_has_one_routing(capsys: pytest.CaptureFixture[str]) -> None:
    """DET-4: what cannot be forced is left out with a word."""
    options = bench_model.options_of(
        bench_model.parser().parse_args(["--routing", "learned,even", "--peer", "none"])
    )
    skipped: list[str] = []
    groups = groups_of(["dense_1b", "tiny"], options, skipped)
    assert [group.name.split(",")[0] for group in groups] == ["dense_1b", "tiny", "tiny"]
    assert skipped == ["dense_1b has no experts: no even routing"]


@pytest.mark.slow
def test_bench_1_plain_is_ours_without_our_overrides() -> None:
    """FP8-1: fp8 beside bf16, in one precision, both clipped or neither; what is for both reaches both."""
    words = ["--peer", "plain", "--precision", "split,bf16", "--ours", "precision.fp8=dense"]
    options = bench_model.options_of(bench_model.parser().parse_args([*words, "data.rule=zipf"]))
    sides = [(group.ours[0], group.peer) for group in groups_of(["dense_1b"], options, [])]
    assert [(ours.precision.fp8, peer.precision.fp8) for ours, peer in sides if peer] == [
        ("dense", "none")
    ] * 2
    for ours, peer in sides:
        assert peer is not None
        assert ours.optimizer.max_norm == peer.optimizer.max_norm
        peer.precision.fp8 = "dense"
        assert (ours, ours.data.rule) == (peer, "zipf")


def test_bench_6_at_most_24_comparisons(capsys: pytest.CaptureFixture[str]) -> None:
    """BENCH-6: more are refused with their number, and so are routings that do not exist."""
    tokens = ",".join(str(64 * n) for n in range(1, 26))
    assert bench_model.main(["--cases", "tiny", "--peer", "none", "--tokens-per-step", tokens]) == 2
    assert "25 comparisons" in capsys.readouterr().err
    assert bench_model.main(["--cases", "tiny", "--routing", "odd"]) == 2
    assert "learned, even, uniform, dirichlet" in capsys.readouterr().err


def test_overrides_by_commas() -> None:
    """A comma inside a list separates nothing."""
    text = "kernels.attention=flash_attn_4,profile.steps=[1,2],+env.A=b,c"
    assert split_overrides(text) == ["kernels.attention=flash_attn_4", "profile.steps=[1,2]", "+env.A=b,c"]


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
