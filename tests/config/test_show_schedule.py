"""The script that draws a schedule: numbers, picture, refusals (ENG-1, ENG-13)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "show_schedule.py"
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zbv", "dualpipev")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    import sys

    spec = importlib.util.spec_from_file_location("show_schedule", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ENG-13: ranks as rows with idle share and peak, a number in every box; the same bytes again."""
    words = ["pipeline=dualpipev", "mesh=pp4", "script.micro_batches=9"]
    out = [tmp_path / name for name in ("one.svg", "two.svg", "three.png")]
    assert [script.main([*words, f"script.out={path}"]) for path in out] == [0, 0, 0]
    printed = capsys.readouterr().out
    assert "dualpipev: 4 ranks x 2 stages, 9 micro-batches; makespan 60 forwards, 10.0% idle" in printed
    assert [line.split() for line in printed.splitlines()[2:6]] == [
        [str(rank), str(rank), str(7 - rank), "10.0%", "9"] for rank in range(4)
    ]
    texts = [node.text or "" for node in ElementTree.parse(out[0]).iter("{http://www.w3.org/2000/svg}text")]
    assert {f"rank {rank}: 10.0% idle, 9 live" for rank in range(4)} <= set(texts)
    assert any("makespan 60 forwards" in text for text in texts)
    # Eight stages run nine micro-batches forward and backward; some backwards are two boxes.
    assert sum(text in "012345678" for text in texts) >= 2 * 8 * 9
    assert out[0].read_bytes() == out[1].read_bytes()
    assert out[2].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(script: ModuleType, schedule: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The config's own micro-batches where none are given; no model is built, whatever its layers."""
    assert script.main([f"pipeline={schedule}", "mesh=pp4"]) == 0
    assert f"{schedule}: 4 ranks" in (printed := capsys.readouterr().out)
    assert "8 micro-batches" in printed


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["pipeline=dualpipev", "mesh=pp4", "script.micro_batches=5"], ["script.micro_batches=8"]),
        (
            ["pipeline=interleaved_1f1b", "mesh=pp2", "micro_batches=7"],
            ["micro_batches=6", "micro_batches=8"],
        ),
        (["pipeline=zbv", "mesh=pp2", "pipeline.stages_per_rank=3"], ["pipeline.stages_per_rank=2"]),
        (["mesh=dp2", "script.out=/nowhere/x.txt"], ["mesh=pp4", "x.svg", "mkdir -p /nowhere"]),
        (["mesh=pp2", "script.micro_batches=0"], ["script.micro_batches=8"]),
        (["pipeline=zbw", "mesh=pp2"], ["zbv"]),
    ],
)
def test_refusals(
    script: ModuleType, words: list[str], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2 with all that is wrong and what to type."""
    assert script.main(words) == 2
    answer = capsys.readouterr()
    assert answer.out == ""
    assert [part for part in told if part not in answer.err] == []
