"""A launch as a process: exit codes, stop requests, orphans, repeated commands (EXIT, LOCAL, RUN, RANK)."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest

from tests.launchers.conftest import Start


def out(process: subprocess.Popen[str]) -> tuple[int, str]:
    text, _ = process.communicate(timeout=60)
    return process.returncode, text


def only_run(tmp_path: Path) -> Path:
    (run,) = (tmp_path / "runs").iterdir()
    return run


def status(run: Path) -> dict[str, Any]:
    return json.loads((run / "status.json").read_text())


def snapshot(directory: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def step_of(tmp_path: Path) -> int:
    found = list(tmp_path.glob("runs/*/fake_step"))
    return int(found[0].read_text() or 0) if found else 0


def rank_pids(run: Path) -> list[int]:
    logs = sorted((run / "ranks").glob("rank_*.log"))
    return [
        int(line.split()[3])
        for log in logs
        for line in log.read_text().splitlines()
        if line.startswith("rank ")
    ]


def is_gone(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True


def test_a_run_from_start_to_end_and_the_same_command_again(start: Start, tmp_path: Path) -> None:
    """LOG-6, RUN-2, RUN-6, CLOSE-1: all papers are there; a finished run exits 0 and touches nothing."""
    code, text = out(start("launching", "max_steps=3"))
    run = only_run(tmp_path)
    assert code == 0, text
    for name in [
        "config.yaml",
        "overrides.yaml",
        "plan.json",
        "env.json",
        "code.json",
        "code.diff",
        "report.md",
        "loss.png",
        "launcher.log",
    ]:
        assert (run / name).is_file(), name
    assert str(run) in text.splitlines()[1]
    assert str(run / "metrics.jsonl") in text.splitlines()[2]
    assert "step 3/3  loss 1.333  lr 1.00e-03  2,000 tokens/s  ETA 0:00" in text
    assert "3 steps, 300 tokens" in text
    assert "python train.py -m" in text
    assert "\x1b" not in text
    found = status(run)
    assert (found["state"], found["exit_code"], found["last_step"], found["attempt"]) == ("done", 0, 3, 1)
    assert not (run / "run.lock").exists()
    before = snapshot(run)
    code, text = out(start("launching", "max_steps=3"))
    assert (code, snapshot(run)) == (0, before)
    assert f"run_name={run.name}-again" in text


@pytest.mark.slow
def test_first_failing_rank_decides(start: Start, tmp_path: Path) -> None:
    """EXIT-1, LOG-4, RANK-2, AGENT-4: 42 is 42, KILL 137, an exception 1 and its traceback on the console."""
    ways = {"exit42": (42, "ExitCode"), "raise": (1, "ValueError"), "kill": (137, "Signal")}
    started = {
        how: start(
            "launching",
            "mesh=ep2",
            "max_steps=3",
            f"+env.FAKE_FAIL=1:{how}@2",
            "+env.FAKE_PATIENCE=1",
            f"run_name={how}",
        )
        for how in ways
    }
    for how, process in started.items():
        code, text = out(process)
        found = status(tmp_path / "runs" / how)
        assert (code, found["reason"]["type"]) == ways[how], text
        assert (found["state"], found["exit_code"], found["first_failing_rank"]) == ("failed", code, 1)
        assert ("ValueError: rank 1 broke" in text) == (how == "raise")
        assert all(is_gone(pid) for pid in rank_pids(tmp_path / "runs" / how))
    assert found["signal"] == signal.SIGKILL


def test_ctrl_c_saves_and_the_same_command_goes_on(start: Start, tmp_path: Path) -> None:
    """LOCAL-2, AGENT-3, RUN-3: INT gives 130, state saved; attempt 2 keeps the papers of attempt 1."""
    process = start("launching", "max_steps=60", "+env.FAKE_SLEEP=0.1")
    wait_for(lambda: step_of(tmp_path) >= 2)
    process.send_signal(signal.SIGINT)
    code, text = out(process)
    run = only_run(tmp_path)
    assert (code, status(run)["state"], status(run)["exit_code"]) == (130, "stopped", 130), text
    assert "state saved" in text
    stopped_at = status(run)["last_step"]
    code, text = out(start("launching", "max_steps=60", "+env.FAKE_SLEEP=0"))
    assert (code, status(run)["state"], status(run)["attempt"]) == (0, "done", 2), text
    assert f"from step {stopped_at + 1}" in text
    assert "step 1/60" not in text
    kept = run / "attempts" / "0001"
    assert json.loads((kept / "status.json").read_text())["state"] == "stopped"
    assert (kept / "config.yaml").is_file()
    assert not (run / "control" / "stop").exists()


def test_term_stops_with_75_and_a_second_signal_kills(start: Start, tmp_path: Path) -> None:
    """AGENT-3, LOCAL-2: TERM saves and exits 75; deaf ranks are killed by the second signal."""
    saving = start("launching", "max_steps=90", "+env.FAKE_SLEEP=0.1", "run_name=saving")
    deaf = start("launching", "max_steps=90", "+env.FAKE_SLEEP=0.1", "+env.FAKE_DEAF=1", "run_name=deaf")
    runs = tmp_path / "runs"
    wait_for(lambda: (runs / "saving/fake_step").exists() and (runs / "deaf/fake_step").exists())
    saving.send_signal(signal.SIGTERM)
    deaf.send_signal(signal.SIGINT)
    wait_for((runs / "deaf/control/stop").exists)
    time.sleep(0.3)
    deaf.send_signal(signal.SIGINT)
    assert out(saving)[0] == 75
    assert (status(runs / "saving")["state"], status(runs / "saving")["signal"]) == (
        "stopped",
        signal.SIGTERM,
    )
    assert out(deaf)[0] == 130
    assert status(runs / "deaf")["state"] == "failed"
    assert all(is_gone(pid) for name in ("saving", "deaf") for pid in rank_pids(runs / name))


@pytest.mark.slow
def test_a_killed_launch_leaves_no_orphan_and_is_gone_on_with(start: Start, tmp_path: Path) -> None:
    """LOCAL-2, RUN-2, RUN-5: KILL takes the ranks along within 10 s; its lock is taken over, the run goes on.

    While it lives, the same command exits 5 and names it.
    """
    first = start("launching", "mesh=ep2", "max_steps=400", "+env.FAKE_SLEEP=0.1", "run_name=one")
    wait_for(lambda: step_of(tmp_path) >= 1)
    code, text = out(start("launching", "mesh=ep2", "max_steps=400", "run_name=one"))
    assert (code, f"process {first.pid}" in text) == (5, True), text
    run = only_run(tmp_path)
    assert status(run)["state"] == "running"
    pids = rank_pids(run)
    assert len(pids) == 2
    first.kill()
    wait_for(lambda: all(is_gone(pid) for pid in pids), 10)
    assert status(run)["state"] == "running"
    at = step_of(tmp_path)
    code, text = out(
        start("launching", "mesh=ep2", f"max_steps={at + 2}", "+env.FAKE_SLEEP=0", "run_name=one")
    )
    assert code == 0, text
    assert status(run)["attempt"] == 2
    assert status(run)["last_step"] == at + 2


@pytest.mark.slow
def test_an_edit_starts_another_run_and_says_so(start: Start, tmp_path: Path, checkout: Path) -> None:
    """RUN-8: the old directory stays, one line names the edited file; undone, it is finished again."""
    assert out(start("launching", "max_steps=2"))[0] == 0
    run = only_run(tmp_path)
    before = snapshot(run)
    source = checkout / "src" / "seeds.py"
    text = source.read_text()
    try:
        source.write_text(text + "\n# edited\n")
        code, said = out(start("launching", "max_steps=2"))
    finally:
        source.write_text(text)
    assert code == 0, said
    assert "other code (src/seeds.py): it is left as it is" in said
    assert status(run.with_name(run.name + ".2"))["state"] == "done"
    assert snapshot(run) == before
    code, said = out(start("launching", "max_steps=2"))
    assert (code, "is finished" in said, snapshot(run) == before) == (0, True, True)


def test_an_outer_launchers_numbers_reach_no_rank(start: Start, tmp_path: Path) -> None:
    """AGENT-1, PLAN-3: inherited rank variables are dropped; blanks and quotes in a path are no problem."""
    outer = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "LOCAL_RANK": "3"}
    code, text = out(start("launching", "max_steps=1", "run_name=one", folder='a b$(c) "d', **outer))
    assert code == 0, text
    log = (tmp_path / 'a b$(c) "d' / "one" / "ranks" / "rank_00000.log").read_text()
    assert log.startswith("rank 0 pid ")
    assert log.endswith("master None\n")


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 100])
def test_bar_in_a_pseudo_terminal(start: Start, tmp_path: Path, checkout: Path, columns: int) -> None:
    """BAR-1: drawn on a terminal within its width, logs above it, the cursor comes back, no bar in a file."""
    words = ["data=synthetic", "max_steps=5", "+env.FAKE_SLEEP=0.3", f"paths.runs={tmp_path}/runs"]
    code, text = in_terminal(checkout, columns, "launching", *words)
    assert code == 0, text
    bars = [part for part in text.replace("\r", "\n").split("\n") if "/5 " in part]
    assert any("4/5" in bar or "3/5" in bar for bar in bars), text
    assert any("loss" in bar for bar in bars) == (columns == 100)
    assert max(len(strip_codes(bar)) for bar in bars) < columns
    assert text.rstrip().rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0
    assert "\x1b[3" not in text
    logged = [line for line in strip_codes(text).replace("\r", "\n").split("\n") if "threads" in line]
    assert [line.startswith("rank 0 pid") for line in logged] == [True]
    for file in (tmp_path / "runs").rglob("*.log"):
        assert "\x1b" not in file.read_text()
        assert "━" not in file.read_text()


def test_only_stderr_is_a_terminal(checkout: Path, tmp_path: Path) -> None:
    """BAR-1: the bar is drawn on stderr, the lines go to the file that stdout is, which gets no bar."""
    words = ["data=synthetic", "max_steps=3", "+env.FAKE_SLEEP=0.3", f"paths.runs={tmp_path}/runs"]
    with (tmp_path / "out").open("w") as file:
        code, text = in_terminal(checkout, 100, "launching", *words, stdout=file)
    lines = (tmp_path / "out").read_text()
    assert code == 0, text
    assert "2/3" in text
    assert "threads" not in text
    assert "threads" in lines
    assert "3 steps, 300 tokens" in lines
    assert "\x1b" not in lines


def in_terminal(
    checkout: Path, columns: int, module: str, *words: str, stdout: TextIO | None = None
) -> tuple[int, str]:
    """Run a command of the tests in a pseudo-terminal; its exit code and all that it wrote there."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {**os.environ, "PYTHONPATH": str(checkout), "TERM": "xterm", "NO_COLOR": "1"}
    env.pop("COLUMNS", None)
    command = [sys.executable, "-m", f"tests.launchers.{module}", *words]
    process = subprocess.Popen(
        command, cwd=checkout, env=env, stdout=stdout or slave, stderr=slave, stdin=slave
    )
    os.close(slave)
    text = read_all(master)
    return process.wait(60), text


def read_all(master: int) -> str:
    data = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:
            return data.decode()
        if not part:
            return data.decode()
        data += part


def strip_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
