"""What the batch shell of a job calls around its step: `python -m src.launchers.batch {start,finish} RUN`.

`start` opens the attempt. `finish` writes `status.json`, puts a stopped job back into the queue, and its exit
code is the job's: that of the first failing rank, so that dependent jobs see the truth (SLURM-3). `watch` and
`hold` stand beside the step on Spur.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from src import runs
from src.compose import load_config
from src.config import Config
from src.digest import config_digest
from src.durations import seconds
from src.errors import UserError
from src.launchers.beats import await_agents
from src.launchers.outcome import codes_of_nodes, node_records
from src.launchers.schedulers import scheduler_of
from src.launchers.settle import fail, settle
from src.launchers.spur_batch import hold, watch
from src.launchers.watch import Ended
from src.records import read_json
from src.status import Status, last_step

KEPT = ("overrides.yaml", "plan.json", "code.json", "code.diff", "job.json", "config.yaml")
"""Papers that a new attempt of the same job takes over."""
REQUEUED = "requeued"
"""Mark in `control/` of an attempt after which the job was queued again."""
KILL_WAIT = 600.0
"""Seconds that a batch shell which was told to end waits to be killed (AGENT-3)."""


def begin(run: Path) -> int:
    """Open the attempt: an empty `control/`, `running` in `status.json`, data if the job is to build it."""
    config = load_config(run / "config.yaml")
    if (run / "control" / "started").exists():
        await_agents(run / "control", seconds(config.launcher.watchdog))
        files = {name: (run / name).read_text(encoding="utf-8") for name in KEPT if (run / name).exists()}
        runs.begin_attempt(runs.Claim(run, runs.attempts(run) + 1), files)
    (run / "control" / "started").write_text(newest_checkpoint(run))
    status = Status("running", runs.attempts(run), config_digest(config))
    status.write(run)
    try:
        prepare(config)
    except Exception as error:
        code = error.code if isinstance(error, UserError) else 4
        fail(status, code, type(error).__name__, str(error))
        status.ended = time.time()
        status.write(run)
        return code
    return 0


def prepare(config: Config) -> None:
    """Build the token artifact in the job if `data.prepare.where=job` wants that."""
    if config.data.kind == "synthetic" or config.data.prepare.where != "job":
        return
    from src.trainer.data.prepare import prepare as build

    build(config, print)


def end(run: Path, step: int, killed: bool) -> int:
    """Settle the attempt whose step ended with code `step`; returns the job's code.

    Args:
        run: its directory.
        step: what srun said.
        killed: whether the shell was told to end: only the scheduler knows whether the job comes back.
    """
    config = load_config(run / "config.yaml")
    await_agents(run / "control", seconds(config.launcher.watchdog))
    if killed:
        time.sleep(KILL_WAIT)
    step = step_code(run, config, step)
    status = Status.read(run) or Status("running", runs.attempts(run), config_digest(config))
    settle_nodes(status, run, step, config.mesh.world)
    status.ended = time.time()
    again = status.state == "stopped" and may_requeue(run, config)
    if again:
        status.state, status.ended = "queued", None
        (run / "control" / REQUEUED).touch()
    status.write(run)
    if again and not scheduler_of(config).requeue(run, os.environ["SLURM_JOB_ID"]):
        (run / "control" / REQUEUED).unlink()
        status.state, status.ended = "stopped", time.time()
        status.write(run)
    assert status.exit_code is not None
    return status.exit_code


def step_code(run: Path, config: Config, step: int) -> int:
    """The step's code; on Spur it says nothing that the records of all nodes do not say better (SPUR-7)."""
    plan = read_json(run / "plan.json") or {}
    is_told = len(node_records(run / "control")) == plan.get("nodes")
    return 0 if config.launcher.name == "spur" and is_told else step


def settle_nodes(status: Status, run: Path, step: int, world: int) -> None:
    """State, code and reason from what the agents left; srun's code where they left nothing."""
    records = node_records(run / "control")
    codes = codes_of_nodes(records)
    settle(status, run, Ended(codes, None, killed=False))
    if status.state == "failed" or (status.state == "stopped" and step == 0):
        return
    broken = next((record for record in records if record["code"]), None)
    if broken is not None:
        fail(status, int(broken["code"]), str(broken["type"]), f"node {broken['node']}: {broken['message']}")
    elif step != 0 or len(codes) < world:
        fail(status, step or 1, "Step", f"srun ended with code {step}, {len(records)} nodes left a record")
    status.last_step = last_step(run)


def may_requeue(run: Path, config: Config) -> bool:
    """Whether a stopped attempt saved more than it began with, and was not queued too often (SLURM-3)."""
    before = (run / "control" / "started").read_text()
    count = len(list((run / "attempts").glob(f"*/control/{REQUEUED}")))
    return newest_checkpoint(run) > before and count < config.launcher.max_requeues


def newest_checkpoint(run: Path) -> str:
    """Name of the newest complete checkpoint; empty without one."""
    return max((path.name for path in (run / "checkpoints").glob("step-*")), default="")


def main() -> int:
    """The batch shell's command; the exit code is the job's where it is not 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("when", choices=["start", "finish", "watch", "hold"])
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, default=0, help="exit code of srun")
    parser.add_argument("--killed", action="store_true", help="whether the shell got SIGTERM")
    arguments = parser.parse_args()
    if arguments.when == "start":
        return begin(arguments.run)
    if arguments.when == "finish":
        return end(arguments.run, arguments.step, arguments.killed)
    return watch(arguments.run) if arguments.when == "watch" else hold(arguments.run)


if __name__ == "__main__":
    raise SystemExit(main())
