"""What is asked of Spur, without one: capabilities, flags, the script, a dry run (SPUR-1 to 4, FLAG)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from src.code_identity import CHECKOUT
from src.compose import compose
from src.config import Config
from src.errors import UserError
from src.launchers import spur_capabilities
from src.launchers.flags import Flag
from src.launchers.plan import make_plan
from src.launchers.spread import Spread
from src.launchers.spur import Spur
from src.launchers.spur_capabilities import Capabilities, of_version, read_capabilities, read_help
from src.launchers.spur_flags import line, spur_flags
from src.launchers.spur_script import script
from tests.fakes.spur import split
from tests.fakes.spurd import uses_srun

BIN = CHECKOUT / "tests" / "fakes" / "bin"
BASE = ("launcher=spur", "data=synthetic")
LATER = Capabilities("0.9.0", "asked", of_version("0.8.0").sbatch, of_version("0.8.0").srun)


@cache
def made(*overrides: str) -> Config:
    return compose([*BASE, *overrides]).config


def table(*words: str, version: str = "0.8.0") -> dict[str, tuple[str, str]]:
    plan = make_plan(made(*words), list(words), capabilities=of_version(version))
    return {flag.name: (flag.value, flag.origin) for flag in plan.flags}


def asked(extra: dict[str, str], version: str = "0.8.0", nodes: int = 1) -> dict[str, str]:
    config = made()
    config = replace(config, launcher=replace(config.launcher, extra=extra))
    flags = spur_flags(config, [], Spread(nodes, 1), "cpu", "x", of_version(version))
    return {flag.name: flag.value for flag in flags}


def refusals(extra: dict[str, str], version: str = "0.8.0", nodes: int = 1) -> list[str]:
    with pytest.raises(UserError) as refused:
        asked(extra, version, nodes)
    assert refused.value.code == 2
    return [f"{problem.key}: {problem.message}; {problem.fix}" for problem in refused.value.problems]


BOTH = (
    "job-name partition account qos nodes ntasks cpus-per-task mem time gres gpus gpus-per-node gpus-per-task"
)
BOTH += " constraint nodelist nodefile exclude reservation exclusive chdir mpi licenses container-image"
ONLY_SBATCH = (
    "mem-per-cpu open-mode array dependency requeue hold begin deadline comment mail-type parsable wrap"
)
ONLY_SRUN = "label input cpu-bind gpu-bind pty jobid overlap"
NEITHER = (
    "signal wckey kill-on-bad-exit unbuffered mem-per-gpu cpus-per-gpu nice test-only wait no-requeue hint"
)


def test_capabilities_of_0_8() -> None:
    """SPUR-1: the rows of the contract's table, spelled out again here."""
    known = of_version("0.8.0")
    assert set(BOTH.split()) <= known.sbatch.keys() & known.srun.keys()
    assert set(ONLY_SBATCH.split()) <= known.sbatch.keys() - known.srun.keys()
    assert set(ONLY_SRUN.split()) <= known.srun.keys() - known.sbatch.keys()
    assert not set(NEITHER.split()) & (known.sbatch.keys() | known.srun.keys())
    assert not known.sbatch["exclusive"]
    assert known.sbatch["nodes"]


@pytest.mark.parametrize(
    ("version", "sbatch", "srun"), [("0.5.0", False, False), ("0.6.0", True, False), ("0.7.0", True, True)]
)
def test_capabilities_by_version(version: str, sbatch: bool, srun: bool) -> None:
    """SPUR-1: what came with 0.6 and 0.7."""
    known = of_version(version)
    assert ("gpus-per-task" in known.sbatch) == sbatch
    assert ("ntasks-per-node" in known.srun) == srun


HELP = """Error: takes jobs

Options:
  -N, --nodes <NODES>
          How many, see --exclusive  [default: 1]
      --exclusive
          Alone
      --later-flag <X>    Something new
  -h, --help
          This
"""


def test_help_is_read() -> None:
    """SPUR-1: options begin their line; what a description names is none."""
    assert read_help(HELP) == {"nodes": True, "exclusive": False, "later-flag": True}
    found = read_capabilities("spur 0.9.2-rc1 (ab)\n", dict.fromkeys(("sbatch", "srun"), HELP), "asked")
    assert (found.version, found.number) == ("0.9.2-rc1", (0, 9))
    lost = read_capabilities("spur 1.0.0", {"sbatch": "?", "srun": HELP}, "asked")
    assert lost.sbatch == of_version("0.5.0").sbatch
    assert "lists no flags" in lost.source


def test_probe_is_kept_until_the_binary_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPUR-1: a plan reads what a submission asked; another binary answers anew; Slurm's is refused."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no sbatch on PATH"):
        spur_capabilities.probe()
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    answers = {"--version": "spur 0.8.3 (ab)", "--help": HELP}
    asked: list[str] = []
    monkeypatch.setattr(spur_capabilities, "said", lambda name, word: asked.append(name) or answers[word])
    assert spur_capabilities.known().source.startswith("the table of 0.8.0")
    assert spur_capabilities.probe() == spur_capabilities.probe() == spur_capabilities.known()
    assert asked == ["sbatch", "sbatch", "srun"]
    os.utime(tmp_path / "sbatch", (1, 1))
    answers["--version"] = "slurm 22.05.8"
    with pytest.raises(UserError, match=r"says 'slurm 22\.05\.8', not spur; type launcher=slurm") as refused:
        spur_capabilities.probe()
    assert refused.value.code == 3


def test_flags_in_the_spelling_of_spur() -> None:
    """SPUR-3, FLAG: seconds of a limit survive, there is no `signal`, each flag once with its origin."""
    found = table("launcher.time=1d90s", "launcher.partition=a", "+launcher.extra.p=b", "mesh=ep2")
    assert found["time"] == ("1-00:01:30", "launcher.time (command line), normalised to D-HH:MM:SS")
    assert found["partition"] == ("b", "launcher.extra.p (command line)")
    words = table('launcher.flags="-pc --mem=8G --exclusive"', "launcher.partition=a")
    assert [words[name][0] for name in ("partition", "mem", "exclusive")] == ["c", "8G", "true"]
    with pytest.raises(UserError, match=r"launcher\.flags: sbatch of Spur .* has no --nice"):
        table('launcher.flags="--nice=5"')
    assert found["cpus-per-task"][0] == "2"
    assert "signal" not in found
    assert table("launcher.gpus_per_node=4", "mesh=pp2ep2", "launcher.nodes=2")["gpus-per-node"][0] == "2"


def test_refusals_come_all_at_once() -> None:
    """SPUR-3: each flag that this Spur lacks or cannot read, and what to type instead, before any is sent."""
    extra = {"nice": "5", "signal": "USR2@9", "exclusive": "user", "mem": "64GB", "time": "4:00", "N": "2-4"}
    found = refusals(extra)
    assert len(found) == len(extra)
    for key, words in {
        "nice": "sbatch of Spur 0.8.0 has no --nice; +launcher.extra.qos=NAME",
        "signal": "has no --signal; launcher.grace says",
        "exclusive": "takes no value",
        "mem": "--mem=64GB: Spur does not read this as it stands; write 64G",
        "time": "--time=4:00: Spur does not read this as it stands; write D-HH:MM:SS",
        "N": "is decided elsewhere: launcher.nodes",
    }.items():
        assert any(text.startswith(f"launcher.extra.{key}:") and words in text for text in found), key


@pytest.mark.parametrize("value", ["64G", "1.5G", "4096", "900M", "8k"])
def test_memory_that_spur_reads(value: str) -> None:
    """SPUR-3: gigabytes may have a fraction."""
    assert asked({"mem": value})["mem"] == value


@pytest.mark.parametrize("value", ["64GB", "1T", "1.5M", "64 G", ""])
def test_memory_that_spur_does_not_read(value: str) -> None:
    """SPUR-3: what Spur would refuse, or cut."""
    assert len(refusals({"mem": value})) == 1


def test_versions_refuse_what_came_later() -> None:
    """SPUR-3, SPUR-4: the fix names the version; srun of 0.5 knows one node."""
    assert refusals({"nodefile": "x"}, version="0.5.0") == [
        "launcher.extra.nodefile: sbatch of Spur 0.5.0 has no --nodefile; take Spur 0.6.0 or newer"
    ]
    (one,) = refusals({}, version="0.5.0", nodes=2)
    assert "2 nodes: srun of Spur 0.5.0 starts its command on the first only" in one


def test_exports(tmp_path: Path) -> None:
    """SPUR-2: pairs become lines of the script, ALL goes, NONE and secrets are refused; wckey is dropped."""
    words = ["+launcher.extra.export='ALL,A=1 2,PATH'", "+launcher.extra.wckey=x", f"paths.runs={tmp_path}"]
    assert not {"export", "wckey"} & table(*words).keys()
    text = Spur().script(made(*words), [make_plan(made(*words), [])])
    assert "\nexport A='1 2'\n" in text
    assert "export PATH=" not in text
    found = refusals({"export": "NONE,HF_TOKEN=abc"})
    assert len(found) == 2
    assert not any("abc" in text for text in found)


@pytest.mark.parametrize("value", ["a b=c", "it's", 'say "x"'])
def test_lines_of_the_script_reach_sbatch(value: str) -> None:
    """FLAG: one argument, whatever blanks it has; Spur's splitting knows no escapes."""
    assert split(line(Flag("comment", value, "")).removeprefix("#SBATCH")) == [f"--comment={value}"]
    assert "cannot stand in a line" in refusals({"comment": "both \" and '"})[0]


def text_of(run: Path, code: Path, nodes: int = 2, shell: dict[str, str] | None = None) -> str:
    flags = make_plan(made("mesh=ep2", "launcher.nodes=2"), []).flags
    return script(flags, nodes, run, run / "spur", code, {"A": "b c"}, shell or {})


def test_script_runs_once_a_job(tmp_path: Path) -> None:
    """SPUR-4: bash takes it, `srun` stands in it unquoted, one task a node, other nodes only hold."""
    text = text_of(tmp_path / "run", tmp_path)
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert uses_srun(text)
    assert not uses_srun("#SBATCH -J srun\necho 'srun x' # srun\n")
    assert text.count("\nsrun -N 2 -n 2 -c 1 bash -c ") == 1
    hold, start = text.index("src.launchers.batch hold"), text.index("src.launchers.batch start")
    assert (
        text.index("unset WORLD_SIZE RANK") < hold < start < text.index("batch watch") < text.index("\nsrun ")
    )
    assert text.rstrip().endswith('finish "$run" --step $? $killed\nexit')


def test_script_keeps_the_threads_of_the_user(tmp_path: Path) -> None:
    """ENV-1: Spur sets threads to a node's cores; the user's number comes back, else the table decides."""
    text = text_of(tmp_path, tmp_path, shell={"OMP_NUM_THREADS": "3"})
    assert "\nexport OMP_NUM_THREADS=3\n" in text
    assert "\nunset MKL_NUM_THREADS\n" in text


def test_odd_directories_reach_the_agent(tmp_path: Path) -> None:
    """PLAN-3: only the directory travels, whatever letters it has; the agent's words go to the log."""
    run = tmp_path / "a b$c'd"
    (run / "spur").mkdir(parents=True)
    text = text_of(run, tmp_path / "co de").replace(sys.executable, "echo")
    shim = 'srun() { shift 6; "$@"; }\n'
    done = subprocess.run(["bash"], input=shim + text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"start {run}" in done.stdout
    assert (run / "spur" / "job.log").read_text() == f"-m src.launchers.node {run}\n"


def test_plan_says_which_spur(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPUR-1, PLAN-1: a dry run names its source; other launchers have none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan = make_plan(made(), [])
    assert plan.capabilities == "Spur 0.8.0, the table of 0.8.0; no Spur was asked"
    assert plan.capabilities in plan.text()
    assert make_plan(made(), [], capabilities=LATER).capabilities == "Spur 0.9.0, asked"
    assert make_plan(compose(["data=synthetic"]).config, []).capabilities is None


def test_dry_run_asks_nobody(tmp_path: Path) -> None:
    """FAKE-2, CFG-17: under commands that fail a dry run calls none of them and writes nothing."""
    state, home = tmp_path / "state", tmp_path / "home"
    home.mkdir()
    environment = {
        "PATH": f"{BIN}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(home),
        "FAKE_SPUR": str(state),
        "FAKE_SPUR_MODES": "failing",
        "HF_TOKEN": "hf_secret",
    }
    words = ["launcher=spur", "data=synthetic", "mesh=ep2", "launcher.nodes=2", "dry_run=true"]
    done = subprocess.run(
        [sys.executable, str(CHECKOUT / "train.py"), *words],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "\nsrun -N 2 -n 2 " in done.stdout
    assert "(derived: one task a node, which starts its ranks)" in done.stdout
    assert "hf_secret" not in done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["launcher"] == "spur"
    assert not state.exists()
    assert list(home.iterdir()) == []
