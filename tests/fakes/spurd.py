"""What Spur does with a job: `python -m tests.fakes.spurd ID` runs its script until it ends, or is ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from tests.fakes.spur import STATE, VERSION, change, job, nodelist, twins

GRACE = float(os.environ.get("FAKE_SPUR_GRACE", "1"))
"""Seconds between SIGTERM and SIGKILL; Spur's are 5 when a job is cancelled, 30 at its limit."""
STEP = re.compile(r"(?:^|[\s;&|])(?:/.*/)?(srun|mpirun|mpiexec)\b")


def uses_srun(script: str) -> bool:
    """Whether the word stands in it outside of quotes and comments."""
    lines = (re.sub(r"'[^']*'|\"[^\"]*\"", "x", line) for line in script.splitlines())
    return any(STEP.search(re.sub(r"(^|\s)#.*", "", line)) for line in lines)


def environment(number: str, known: dict[str, Any], node: int, nodes: int) -> dict[str, str]:
    """Of a batch shell: as if each node were one rank."""
    values = {"JOB_ID": number, "JOB_NUM_NODES": nodes, "NNODES": nodes, "NTASKS": nodes, "NODEID": node}
    cores = known["flags"].get("cpus-per-task", "1")
    values |= {"JOB_NODELIST": nodelist(nodes), "CPUS_PER_TASK": cores, "TASKS_PER_NODE": 1, "PROCID": node}
    ranks = {"RANK": node, "NODE_RANK": node, "WORLD_SIZE": nodes, "LOCAL_RANK": 0, "MASTER_PORT": 29500}
    torch = {"MASTER_ADDR": "localhost", "OMP_NUM_THREADS": cores, **{k: str(v) for k, v in ranks.items()}}
    return {**os.environ, **twins(values), **torch}


def limit_of(known: dict[str, Any]) -> float:
    """Seconds of the time limit."""
    text = known["flags"].get("time")
    if text is None:
        return float("inf")
    days, hours, minutes, seconds = (int(part) for part in text.replace("-", ":").split(":"))
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def start(number: str, known: dict[str, Any]) -> list[subprocess.Popen[bytes]]:
    """Start the batch shells: of the first node, or of each where no version knows better."""
    nodes = int(known["flags"].get("nodes", "1"))
    alone = VERSION in ("0.8.0", "later") and uses_srun(known["script"])
    spool = STATE / "jobs" / f"{number}.sh"
    spool.write_text(known["script"])
    log = known["flags"]["output"]
    return [
        subprocess.Popen(
            ["bash", str(spool)],
            env=environment(number, known, node, nodes),
            cwd=known["cwd"],
            stdout=open(log, "ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for node in range(1 if alone else nodes)
    ]


def send(shells: list[subprocess.Popen[bytes]], which: signal.Signals) -> None:
    """To the process group of each shell; steps are in none of them."""
    for shell in shells:
        if shell.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, which)


def run(number: str) -> str:
    """Run the script once and return the state that it ends in."""
    known = job(number)
    change(number, state="RUNNING", wanted=None)
    shells, end, kill_at = start(number, known), time.monotonic() + limit_of(known), float("inf")
    wanted = None
    while any(shell.poll() is None for shell in shells):
        time.sleep(0.05)
        if wanted is None:
            wanted = job(number).get("wanted") or ("TIMEOUT" if time.monotonic() > end else None)
            if wanted is not None:
                send(shells, signal.SIGTERM)
                kill_at = time.monotonic() + GRACE
        if time.monotonic() > kill_at:
            send(shells, signal.SIGKILL)
    code = shells[0].returncode
    change(number, code=code if code >= 0 else 128 - code)
    return wanted or ("COMPLETED" if code == 0 else "FAILED")


def main(number: str) -> None:
    """Run it as often as it is requeued."""
    if job(number).get("wanted"):
        change(number, state="CANCELLED")
        return
    while (state := run(number)) == "REQUEUED":
        change(number, state="PENDING")
        time.sleep(0.5)
    change(number, state=state)


if __name__ == "__main__":
    main(sys.argv[1])
