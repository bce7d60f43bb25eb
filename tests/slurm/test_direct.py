"""torchrun starts the processes, each becomes its rank (DIRECT); srun's rows are in test_cluster.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from src.code_identity import CHECKOUT
from src.records import read_json, read_steps
from tests.slurm.conftest import TINY

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]


def begin(tmp_path: Path, name: str, command: list[str], *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, *TINY, f"paths.runs={tmp_path}", f"run_name={name}", *words],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    """DIRECT-1, DIRECT-2, DIRECT-4: the losses of a local launch; a failure's own code is in `status.json`;
    another number of processes is refused, and nobody waits for ever."""
    started = {
        "local": begin(tmp_path, "local", [sys.executable, "train.py"], "mesh=ep2"),
        "same": begin(tmp_path, "same", TORCHRUN, "mesh=ep2", "launcher=direct"),
        "diverged": begin(tmp_path, "diverged", TORCHRUN, "mesh=ep2", "optimizer.lr=1e38"),
        "refused": begin(tmp_path, "refused", TORCHRUN, "mesh=pp2ep2"),
    }
    texts = {name: process.communicate(timeout=150)[0] for name, process in started.items()}
    codes = {name: process.returncode for name, process in started.items()}
    assert codes == {"local": 0, "same": 0, "diverged": 1, "refused": 1}, texts
    local, same = ([s["loss"] for s in read_steps(tmp_path / n / "metrics.jsonl")] for n in ("local", "same"))
    assert local == same
    assert len(local) == 3
    assert (tmp_path / "same" / "report.md").is_file()
    assert texts["same"].count("manyhead") == 1
    assert (tmp_path / "same" / "ranks" / "rank_00001.log").read_text().startswith("rank 1 pid")
    status = read_json(tmp_path / "diverged" / "status.json") or {}
    assert (status["state"], status["exit_code"]) == ("failed", 7), texts["diverged"]
    assert "torchrun started 2 processes, mesh=pp2ep2 has 4 ranks" in texts["refused"]
    assert not (tmp_path / "refused").exists()
