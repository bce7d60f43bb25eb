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
from src.launchers.beats import await_agents
from src.launchers.outcome import code_words, codes_of_nodes, node_records
from src.launchers.scheduler import own_id
from src.launchers.schedulers import scheduler_of
from src.launchers.settle import fail, settle
from src.launchers.spur_batch import hold, watch
from src.launchers.watch import Ended
from src.records import read_json, write_json
from src.status import Status, last_step

KEPT = ("overrides.yaml", "plan.json", "code.json", "code.diff", "job.json", "config.yaml")
"""Papers that a new attempt of the same job takes over."""
TAKEN = 5
"""Code of a job whose run directory another living job has."""
REQUEUED = "requeued"
"""Mark in `control/` of an attempt after which the job was queued again."""
KILL_WAIT = 600.0
"""Seconds that a batch shell which was told to end waits to be killed (AGENT-3)."""


def begin(run: Path) -> int:
    """Open the attempt: an empty `control/` and `running` in `status.json`. TAKEN: it is another job's."""
    config = load_config(run / "config.yaml")
    if not adopt(run, config, own_id(os.environ)):
        return TAKEN
    if (run / "control" / "started").exists():
        await_agents(run / "control", seconds(config.launcher.watchdog))
        files = {name: (run / name).read_text(encoding="utf-8") for name in KEPT if (run / name).exists()}
        runs.begin_attempt(runs.Claim(run, runs.attempts(run) + 1), files)
    (run / "control" / "started").write_text(newest_checkpoint(run))
    status = Status("running", runs.attempts(run), config_digest(config))
    status.write(run)
    return 0


def adopt(run: Path, config: Config, number: str | None) -> bool:
    """Whether the run is this job's; one that its command was killed before noting notes itself (RUN-5).

    On Spur the job before may still be ending, after it has put another one in its own place.
    """
    record = read_json(run / "job.json") or {}
    noted = record.get("id")
    if number is None or noted == number:
        return True
    is_handed_on = config.launcher.name == "spur" and (run / "control" / REQUEUED).exists()
    seen = {} if noted is None or is_handed_on else scheduler_of(config).look([noted])
    if noted is not None and (seen is None or (noted in seen and seen[noted].is_alive)):
        print(f"{run} is the run of job {noted}: this job, {number}, leaves it alone", flush=True)
        return False
    write_json(run / "job.json", {**record, "id": number})
    return True


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
        who = ", ".join(str(record["node"]) for record in records) or "none"
        message = f"srun ended with {code_words(step)}; agents that left a record, by node: {who}"
        fail(status, step or 1, "Step", message)
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
