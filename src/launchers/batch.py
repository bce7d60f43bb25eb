"""What the batch shell of a job calls around its step: `python -m src.launchers.batch {start,finish} RUN`.

`start` opens the attempt. `finish` writes `status.json`, puts a stopped job back into the queue, and its exit
code is the job's: that of the first failing rank, so that dependent jobs see the truth (SLURM-3).
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
from src.launchers import scheduler
from src.launchers.outcome import code_words, codes_of_nodes, node_records
from src.launchers.settle import fail, settle
from src.launchers.watch import Ended
from src.records import read_json, write_json
from src.status import Status, last_step

KEPT = ("overrides.yaml", "plan.json", "code.json", "code.diff", "job.json", "config.yaml")
"""Papers that a new attempt of the same job takes over."""
TAKEN = 5
"""Code of a job whose run directory another living job has."""
REQUEUED = "requeued"
"""Mark in `control/` of an attempt after which the job was queued again."""


def begin(run: Path) -> int:
    """Open the attempt: an empty `control/` and `running` in `status.json`. TAKEN: it is another job's."""
    if not adopt(run, scheduler.own_id(os.environ)):
        return TAKEN
    config = load_config(run / "config.yaml")
    if (run / "control" / "started").exists():
        files = {name: (run / name).read_text(encoding="utf-8") for name in KEPT if (run / name).exists()}
        runs.begin_attempt(runs.Claim(run, runs.attempts(run) + 1), files)
    (run / "control" / "started").write_text(newest_checkpoint(run))
    status = Status("running", runs.attempts(run), config_digest(config))
    status.write(run)
    return 0


def adopt(run: Path, number: str | None) -> bool:
    """Whether the run is this job's; one that its command was killed before noting notes itself (RUN-5)."""
    record = read_json(run / "job.json") or {}
    noted = record.get("id")
    if number is None or noted == number:
        return True
    seen = {} if noted is None else scheduler.look([noted])
    if noted is not None and (seen is None or (noted in seen and seen[noted].is_alive)):
        print(f"{run} is the run of job {noted}: this job, {number}, leaves it alone", flush=True)
        return False
    write_json(run / "job.json", {**record, "id": number})
    return True


def end(run: Path, step: int) -> int:
    """Settle the attempt whose step ended with code `step`; returns the job's code."""
    config = load_config(run / "config.yaml")
    status = Status.read(run) or Status("running", runs.attempts(run), config_digest(config))
    settle_nodes(status, run, step, config.mesh.world)
    status.ended = time.time()
    again = status.state == "stopped" and may_requeue(run, config)
    if again:
        status.state, status.ended = "queued", None
        (run / "control" / REQUEUED).touch()
    status.write(run)
    if again and not scheduler.requeue(os.environ["SLURM_JOB_ID"]):
        (run / "control" / REQUEUED).unlink()
        status.state, status.ended = "stopped", time.time()
        status.write(run)
    assert status.exit_code is not None
    return status.exit_code


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
    parser.add_argument("when", choices=["start", "finish"])
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, default=0, help="exit code of srun")
    arguments = parser.parse_args()
    return begin(arguments.run) if arguments.when == "start" else end(arguments.run, arguments.step)


if __name__ == "__main__":
    raise SystemExit(main())
