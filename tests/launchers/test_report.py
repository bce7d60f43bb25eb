"""Reports, figures, closing screen and progress against numbers by hand (REPORT, CLOSE-1, BAR-1)."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from src.code_identity import CHECKOUT
from src.compose import compose, dump_config
from src.config import Config
from src.errors import UserError
from src.figures import level, mean_and_band
from src.launchers.bar import Progress
from src.launchers.closing import (
    closing_screen,
    command,
    next_commands,
    other_mesh,
    sample,
    shrink,
    strip,
)
from src.launchers.console import clock
from src.records import LineReader, read_steps
from src.report import spread, write_report
from src.report_facts import JUDGED_STEPS, RunFacts, compare, find_runs, groups, overrides_text
from src.report_seeds import by_seed

SHARES = [0.5, 0.25, 0.25, 0.0]


@pytest.fixture(scope="module")
def configs() -> dict[str, Config]:
    return {
        mesh: compose(["data=synthetic", f"mesh={mesh}", "max_steps=4"]).config for mesh in ("single", "ep2")
    }


def step(number: int, loss: float | str, norm: float = 2.0) -> dict[str, Any]:
    layer = {"max_over_mean": 2.0, "dead": 1, "load": SHARES}
    speed = None if number < 3 else 1000.0 * number
    return {
        **{"step": number, "loss": loss, "grad_norm": norm, "lr": 0.001, "tokens_total": 50 * number},
        **{"step_time": 0.5, "tokens_per_s": speed, "moe": {"layers": {"1": layer, "10": layer}}},
    }


def make_run(path: Path, config: Config, overrides: list[str], losses: list[Any], **more: Any) -> Path:
    """A run directory as a launch leaves it; `more`: state, code, norm, seed, index."""
    path.mkdir(parents=True)
    config.seed, config.sweep.index = more.get("seed", 0), more.get("index", 0)
    (path / "config.yaml").write_text(dump_config(config))
    (path / "overrides.yaml").write_text(overrides_text(overrides))
    state = more.get("state", "done")
    reason = {"type": "ValueError", "message": "a|b\nc"} if state == "failed" else None
    status = {"state": state, "exit_code": 0 if state == "done" else 1, "reason": reason}
    (path / "status.json").write_text(json.dumps(status))
    (path / "code.json").write_text(json.dumps({"code_identity": more.get("code", "c"), "data_key": "d"}))
    lines = [json.dumps(step(k + 1, loss, more.get("norm", 2.0))) for k, loss in enumerate(losses)]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def sweep(tmp_path: Path, configs: dict[str, Config]) -> Path:
    """single: seeds 0, 1, 2; ep2: seed 0 with 0.1 % more loss, seed 1 of other code, seed 2 failed."""
    rows: list[tuple[str, int, list[Any], dict[str, Any]]] = [
        ("single", 0, [4.0, 3.0, 2.5, 2.0], {}),
        ("single", 1, [4.0, 3.0, 2.5, 3.0], {}),
        ("single", 2, [4.0, 3.0, 2.5, 4.0], {}),
        ("ep2", 0, [4.0, 3.0, 2.5, 2.004], {"norm": 2.0002}),
        ("ep2", 1, [4.0, 3.0, 2.5, 3.0], {"code": "other"}),
        ("ep2", 2, [4.0, "nan"], {"state": "failed"}),
    ]
    for index, (mesh, seed, losses, more) in enumerate(rows):
        overrides = [f"seed={seed}", f"mesh={mesh}", "max_steps=4"]
        make_run(
            tmp_path / f"{mesh}-{seed}", configs[mesh], overrides, losses, seed=seed, index=index, **more
        )
    return tmp_path


def test_sweep_report(sweep: Path) -> None:
    """REPORT-1 to 3: rows, mean ± sd with n, what is not averaged, differences between meshes."""
    text = write_report(sweep).read_text()
    facts = json.loads((sweep / "report.json").read_text())
    assert facts["swept"] == ["seed", "mesh"]
    assert [run["directory"].rpartition("/")[2] for run in facts["runs"]][:2] == ["single-0", "single-1"]
    assert facts["runs"][1]["best_loss"] == 2.5
    assert facts["runs"][0]["tokens_per_s"] == 3500.0
    failed = facts["runs"][5]
    assert (failed["state"], failed["steps"], failed["last_loss"]) == ("failed", 2, 4.0)
    single, first, second = facts["groups"]
    assert (single["keys"], single["n"], single["seeds"]) == ({"mesh": "single"}, 3, [0, 1, 2])
    assert single["last_loss"] == {"mean": 3.0, "sd": 1.0, "n": 3}
    assert (first["n"], first["last_loss"]["sd"], second["n"]) == (1, None, 1)
    assert (single["apart"], first["apart"], second["apart"]) == ({}, {"code": "c"}, {"code": "other"})
    assert "mesh=ep2 (code other)" in text
    assert "mesh=ep2: not averaged together, for code differ" in facts["notes"]
    assert "mesh=ep2: 2 of 3 runs are done" in facts["notes"]
    pairs = {pair["seed"]: pair for pair in facts["meshes"]}
    assert pairs[0]["first"], pairs[0]["mesh"] == ("single", "ep2")
    assert math.isclose(pairs[0]["loss"], 0.004 / 2.0)
    assert math.isclose(pairs[0]["grad_norm"], 0.0002 / 2.0, rel_tol=1e-9)
    assert pairs[0]["flagged"] is True
    assert 1 not in pairs
    assert (pairs[2]["loss"], pairs[2]["flagged"]) == (None, True)
    assert "3.0 ± 1.0" in text
    assert "a\\|b c" in text
    assert (sweep / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("mean", "sd", "text"),
    [
        (8.64001, 0.0439, "8.640 ± 0.044"),
        (4822.74, 1292.36, "4,823 ± 1,292"),
        (3.0, 1.0, "3.0 ± 1.0"),
        (51.25, 12.5, "51 ± 12"),
        (2.5, 0.0, "2.5 ± 0"),
        (2.5, None, "2.5"),
        (math.nan, math.nan, "nan ± nan"),
    ],
)
def test_spread(mean: float, sd: float | None, text: str) -> None:
    """REPORT-1: two digits of the deviation, and the mean as far."""
    assert spread({"mean": mean, "sd": sd, "n": 3}) == text


def test_a_sweep_without_a_finished_run(tmp_path: Path, configs: dict[str, Config]) -> None:
    """REPORT-1: a table of what failed; neither a figure nor a link to one."""
    make_run(tmp_path / "a", configs["single"], ["seed=0"], [], state="failed")
    text = write_report(tmp_path).read_text()
    assert "failed" in text
    assert "loss.png" not in text
    assert not (tmp_path / "loss.png").exists()


@pytest.mark.parametrize(("bad", "flagged"), [(2, True), (JUDGED_STEPS, True), (JUDGED_STEPS + 1, False)])
def test_meshes_are_judged_by_their_first_steps(configs: dict[str, Config], bad: int, flagged: bool) -> None:
    """REPORT-2: a late difference is shown, only an early one is flagged; rounding grows with the steps."""
    steps = [step(n, 3.0) for n in range(1, JUDGED_STEPS + 3)]
    other = [{**s, "loss": 3.3} if s["step"] == bad else s for s in steps]
    facts = [
        RunFacts(Path(mesh), configs[mesh], {"mesh": mesh}, {}, {}, lines, [])
        for mesh, lines in (("single", steps), ("ep2", other))
    ]
    found = compare(*facts)
    assert math.isclose(found["loss"], 0.1)
    assert found["flagged"] is flagged


def test_band_of_a_group(sweep: Path) -> None:
    """REPORT-3: the figure's line is the mean over seeds, its band the sample standard deviation."""
    found, _ = groups(find_runs(sweep)[0])
    curves = [{s["step"]: level(s["loss"]) for s in run.steps} for run in found[0].runs]
    steps, means, sds = mean_and_band(curves)
    assert (steps, means, sds) == ([1, 2, 3, 4], [4.0, 3.0, 2.5, 3.0], [0.0, 0.0, 0.0, 1.0])


@pytest.fixture(scope="module")
def twins() -> dict[str, Config]:
    """The two models of `experiment=ten_minutes`."""
    names = ("deepseek_v2", "dense/twin")
    return {name: compose(["data=synthetic", f"model={name}", "max_steps=4"]).config for name in names}


@pytest.fixture
def models(tmp_path: Path, twins: dict[str, Config]) -> Path:
    """A mixture and its twin at seeds 3, 5 and 8, the mixture in front by 0.1, 0.2 and then behind by 0.1."""
    rows = {"deepseek_v2": (2.0, 2.1, 2.3), "dense/twin": (2.1, 2.3, 2.2)}
    for model, ends in rows.items():
        for seed, end in zip((3, 5, 8), ends, strict=True):
            path = tmp_path / f"{model.replace('/', '-')}-{seed}"
            make_run(path, twins[model], [f"model={model}", f"seed={seed}"], [4.0, end], seed=seed)
            points = ((0, 9.0), (2, 2 * end), (4, end))
            lines = [{"step": s, "loss": 2 * x, "bits_per_byte": x} for s, x in points]
            (path / "evaluation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_models_are_compared_seed_by_seed(models: Path) -> None:
    """REPORT-1: runs that differ in model are groups with mean and spread; each seed shows who leads."""
    text = write_report(models).read_text()
    facts = json.loads((models / "report.json").read_text())
    first, second = facts["groups"]
    assert (first["keys"], first["n"]) == ({"model": "deepseek_v2"}, 3)
    assert math.isclose(first["bits_per_byte"]["mean"], 6.4 / 3)
    assert math.isclose(second["bits_per_byte"]["sd"], 0.1, rel_tol=1e-9)
    compared = facts["by_seed"]
    assert (compared["measure"], compared["groups"]) == (
        "bits_per_byte",
        ["model=deepseek_v2", "model=dense/twin"],
    )
    assert [one["seed"] for one in compared["rows"]] == [3, 5, 8]
    ahead = [one["differences"][0] for one in compared["rows"]]
    assert all(math.isclose(x, y, abs_tol=1e-12) for x, y in zip(ahead, (0.1, 0.2, -0.1), strict=True))
    assert "+0.2000" in text
    assert "-0.1000" in text
    assert "![held out](heldout.png)" in text
    assert (models / "heldout.png").read_bytes().startswith(b"\x89PNG")


def test_groups_without_a_common_measure_or_seed_are_not_compared(
    models: Path, twins: dict[str, Config]
) -> None:
    """REPORT-1: without bytes the held-out loss is compared, without a shared seed nothing."""
    for run in models.glob("*/evaluation.jsonl"):
        lines = [json.loads(line) | {"bits_per_byte": None} for line in run.read_text().splitlines()]
        run.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found, _ = groups(find_runs(models)[0])
    compared = by_seed(found)
    assert compared is not None
    assert (compared["measure"], compared["rows"][0]["values"]) == ("heldout_loss", [4.0, 4.2])
    assert by_seed([found[0], replace(found[1], runs=[])]) is None
    assert by_seed(found[:1]) is None


def test_report_script_rebuilds(sweep: Path) -> None:
    """REPORT-1: `scripts/report.py DIR` makes the same report from the run directories alone."""
    (sweep / "old").mkdir()
    (sweep / "old" / "config.yaml").write_text("model: {family: gone}\n")
    write_report(sweep, figure=False)
    assert "old is left out" in (sweep / "report.md").read_text()
    before = (sweep / "report.json").read_bytes()
    (sweep / "report.json").unlink()
    script = [sys.executable, str(CHECKOUT / "scripts" / "report.py"), str(sweep), "--no-figure"]
    assert subprocess.run(script, cwd="/", check=False).returncode == 0
    assert (sweep / "report.json").read_bytes() == before
    with pytest.raises(UserError, match="holds no run"):
        write_report(sweep / "single-0" / "nothing")


@pytest.fixture
def single(tmp_path: Path, configs: dict[str, Config]) -> Path:
    """A run with evaluations and samples; step 2 was repeated by a second attempt."""
    run = make_run(tmp_path / "one", configs["single"], ["max_steps=4"], [8.0, 99.0, 4.0, 2.0])
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step(2, 6.0)) + '\n{"step": 3, "lo')
    lines = [
        {"step": s, "loss": x, "bits_per_byte": x / 2, "frequencies": 6.67, "pairs": 4.3, "uniform": 9.01}
        for s, x in ((0, 9.0), (4, 5.25))
    ]
    (run / "evaluation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = [
        {"step": s, "prompt": "def f(", "mode": m, "text": f"{m} {s}\n```"}
        for s in (0, 4)
        for m in ("greedy", "sampled")
    ]
    (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    return run


def test_closing_screen(single: Path) -> None:
    """CLOSE-1: steps, tokens, time, held-out loss between its lines, curve, loads, sample, commands."""
    lines = closing_screen(single, ["max_steps=4"]).splitlines()
    assert lines[1] == "done       4 steps, 200 tokens in 0:02 (100 tokens/s)"
    assert lines[2] == f"directory  {single}"
    assert [line[11:] for line in lines[3:7]] == [
        "  9.010 nats  all tokens alike",
        "  6.670 nats  token frequencies",
        "  5.250 nats  this model  2.625 bits per byte",
        "  4.300 nats  pairs of tokens",
    ]
    assert lines[7] == "loss       8.000 █▆▃▁ 2.000"
    assert lines[8] == "experts    layer 1   █▅▅▁ max/mean 2.00, 1 dead"
    assert lines[9] == "           layer 10  █▅▅▁ max/mean 2.00, 1 dead"
    assert lines[10] == "sample     before  def f( │ greedy 0\\n```"
    assert lines[11] == "           after   def f( │ greedy 4\\n```"
    assert len(lines) == 15


def test_speed_of_a_shared_machine(tmp_path: Path, configs: dict[str, Config]) -> None:
    """REPORT-1: tokens/s of jobs side by side is never averaged with that of runs alone without a word."""
    for seed, jobs in enumerate((1, 4, 4)):
        run = make_run(tmp_path / str(seed), configs["single"], [f"seed={seed}"], [2.0, 1.0], seed=seed)
        (run / "plan.json").write_text(json.dumps({"jobs": jobs}))
    write_report(tmp_path, figure=False)
    text = (tmp_path / "report.md").read_text()
    assert "mixes runs of 1 (n=1) and 4 (n=2) jobs side by side" in text
    assert "Jobs ran 4 side by side" in text
    rows = json.loads((tmp_path / "report.json").read_text())["runs"]
    assert [row["side_by_side"] for row in rows] == [1, 4, 4]


def test_run_report(single: Path) -> None:
    """REPORT-3: a single run has all three files; readers take the last line of a step (LOG-3)."""
    assert [record["loss"] for record in read_steps(single / "metrics.jsonl")] == [8.0, 6.0, 4.0, 2.0]
    text = write_report(single).read_text()
    facts = json.loads((single / "report.json").read_text())
    assert (facts["kind"], facts["last_loss"], facts["heldout_loss"], facts["bits_per_byte"]) == (
        "run",
        2.0,
        5.25,
        2.625,
    )
    assert "````text" in text
    assert "| 0    | 9 " in text
    assert (single / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_sample_before_and_after(single: Path, tmp_path: Path) -> None:
    """SAMPLE-1, CLOSE-1: the first prompt's greedy text at step 0 and at the last; nothing without any."""

    def shown(*steps: int) -> list[str]:
        keys = [(s, p, m) for s in steps for p in ("a", "b") for m in ("sampled", "greedy")]
        return sample([{"step": s, "prompt": p, "mode": m, "text": f"{m}\n{s}"} for s, p, m in sorted(keys)])

    assert shown(0, 10, 120) == ["before  a │ greedy\\n0", "after   a │ greedy\\n120"]
    assert shown(0) == ["before  a │ greedy\\n0"]
    assert shown(50, 70) == ["after   a │ greedy\\n70"]
    assert shown() == []


def test_next_commands_name_each_key_once_and_no_directory() -> None:
    """CLOSE-1: repeated keys, sizes of the old mesh and what means one directory are left out."""
    typed = ["max_steps=3", "mesh=ep2", "mesh.pp=2", "++max_steps=9", "resume=/r/c/step-3", "run_name=x"]
    assert command(typed, "mesh=single") == "python train.py ++max_steps=9 mesh=single"
    assert command(["-m", "seed=4", *typed[:1]], "seed=0,1,2") == "python train.py -m max_steps=3 seed=0,1,2"


def test_next_mesh_suits_the_run(single: Path, tmp_path: Path, configs: dict[str, Config]) -> None:
    """CLOSE-1: no command that would be refused: one sample a step fits no mesh of data ranks."""

    def other(**changes: int) -> str | None:
        (tmp_path / "config.yaml").write_text(dump_config(replace(configs["single"], **changes)))
        return other_mesh(tmp_path, [])

    assert other() == "pp2ep2"
    assert other(global_batch_size=2) == "pp2"
    assert other(global_batch_size=1, micro_batch_size=1) == "pp2"
    assert other(model=replace(configs["single"].model, num_layers=1), global_batch_size=2) is None
    assert "checkpoints.py list" in next_commands(tmp_path, [])[0]


def test_next_commands() -> None:
    """CLOSE-1: the commands keep the overrides, replace the one they change, and can be pasted."""
    shown = next_commands(Path("/r/a b"), ["mesh=ep2", "run_name=x", "seed=3", "+env.A='b c'"])
    assert shown[0].startswith("python train.py seed=3 '+env.A='\"'\"'b c'\"'\"'' mesh=single ")
    assert shown[1].startswith("python train.py -m mesh=ep2 ")
    assert "seed=3" not in shown[1]
    assert "'/r/a b'" in shown[2]
    assert command(["mesh=single"], "mesh=pp2ep2") == "python train.py mesh=pp2ep2"


def test_strips() -> None:
    """Sparklines: ends of the scale, neighbours averaged, not finite is blank, a flat line is low."""
    assert strip([0.0, 3.5, 7.0]) == "▁▅█"
    assert strip([2.0, math.nan, 4.0]) == "▁ █"
    assert strip([5.0, 5.0]) == "▁▁"
    assert strip([]) == ""
    assert shrink([1.0, 3.0, 5.0, 9.0, 2.0], 2) == [2.0, 16 / 3]


@pytest.mark.parametrize(("width", "wide"), [(39, False), (60, False), (100, True), (200, True)])
def test_bar(tmp_path: Path, width: int, wide: bool) -> None:
    """BAR-1: step, loss, lr, tokens/s and time left within the width, 40 columns included."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(step(k, 2.0)) + "\n" for k in range(1, 11)))
    progress = Progress(path, total=130)
    assert progress.bar(width) == "0/130 starting"
    assert [record["step"] for record in progress.read()] == list(range(1, 11))
    bar = progress.bar(width)
    assert len(bar) <= width
    assert progress.speed == 6500.0
    assert progress.left == 60.0
    words = (
        ("loss 2.000", "lr 1.00e-03", "6,500 tokens/s", "ETA 1:00")
        if wide
        else ("2.00", "1e-03", "6.5k/s", "1:00")
    )
    assert all(word in bar for word in ("10/130", *words))
    assert progress.bar(30, "a-job").startswith("a-job  ")
    assert progress.plain() == "step 10/130  loss 2.000  lr 1.00e-03  6,500 tokens/s  ETA 1:00"


def test_line_reader_waits_for_whole_lines(tmp_path: Path) -> None:
    """A line that is half written is read once it is whole; what was there before can be passed over."""
    path = tmp_path / "file"
    assert LineReader(path).new_lines() == []
    path.write_text("old\n")
    new, all_lines = LineReader(path, from_end=True), LineReader(path)
    with path.open("a") as file:
        file.write("one\ntw")
        file.flush()
        assert (new.new_lines(), all_lines.new_lines()) == (["one"], ["old", "one"])
        file.write("o\n")
    assert (new.new_lines(), all_lines.new_lines()) == (["two"], ["two"])


def test_clock() -> None:
    """Durations for people."""
    assert [clock(seconds) for seconds in (0, 42.4, 725, 11400)] == ["0:00", "0:42", "12:05", "3:10:00"]
