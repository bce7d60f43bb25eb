"""Scripts: verbs, flags and paths are argparse's, config is overrides, own values are typed (CFG-20)."""

from __future__ import annotations

import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from src.compose import compose
from src.errors import UserError
from src.script import script_values

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.name for path in (CHECKOUT / "scripts").glob("*.py"))
WITH_CONFIG = {
    "prepare_data.py": ["build"],
    "bench_program.py": [],
    "bench_sweep.py": [],
    "doctor.py": [],
    "evaluate.py": [],
    "show_schedule.py": [],
}
"""Scripts that take overrides, with the words before them."""


@dataclass
class Values:
    """As a script would declare its own."""

    jobs: int = 100
    rate: float = 0.5
    run: str | None = None
    seed: int = 7
    """The config has a key of this name."""


def run(script: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(CHECKOUT), "HOME": str(folder)}
    command = [sys.executable, str(CHECKOUT / "scripts" / script), *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def in_process(script: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit code of a command; modules that other tests have imported are there already."""
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(CHECKOUT / "scripts" / script), run_name="__main__")
    return left.value.code


@pytest.mark.parametrize("script", SCRIPTS)
def test_flags_are_argparse(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CFG-20: each script has --help and exits 2 for a flag that it does not have."""
    assert in_process(script, ["--help"], monkeypatch) == 0
    assert capsys.readouterr().out.startswith("usage: ")
    assert in_process(script, [*WITH_CONFIG.get(script, []), "--no-such-flag"], monkeypatch) == 2
    assert "usage: " in capsys.readouterr().err


@pytest.mark.parametrize("script", sorted(WITH_CONFIG))
def test_config_is_overrides(script: str, tmp_path: Path) -> None:
    """CFG-20, CFG-1: an unknown key is refused with its nearest, before anything is done."""
    bad = run(script, *WITH_CONFIG[script], "sead=3", "optimizer.lr=fast", folder=tmp_path)
    assert bad.returncode == 2
    assert "did you mean seed?" in bad.stderr
    assert "optimizer.lr: takes a number" in bad.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_scripts_own_values() -> None:
    """CFG-20: by the prefix, or without it where the config has no such key; the rest is the config's."""
    values, rest = script_values(Values, ["jobs=6", "script.seed=1", "seed=2", "rate=1", "+env.A='1'"])
    assert values == Values(jobs=6, rate=1.0, seed=1)
    assert isinstance(values.rate, float)
    assert rest == ["seed=2", "+env.A='1'"]
    assert compose(rest).config.seed == 2
    assert script_values(Values, []) == (Values(), [])
    assert script_values(Values, ["run=null", 'script.run="a=b"'])[0].run == "a=b"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("script.jbos=6", "did you mean script.jobs?"),
        ("jobs=6.5", "takes a whole number"),
        ("rate=fast", "takes a number"),
        ("run=12e5", 'script.run="12e5"'),
        ("~script.jobs", "cannot be deleted"),
        ("+script.jobs=1", "is there already"),
        ("jobs=1,2", "is several values"),
        ("run=a#b", "grammar"),
    ],
)
def test_wrong_values(line: str, said: str) -> None:
    """CFG-20, CFG-1 to CFG-6: refused like a key of the config."""
    with pytest.raises(UserError) as refused:
        script_values(Values, [line, "script.rate=slow"])
    assert said in str(refused.value)
    assert "script.rate" in str(refused.value)
