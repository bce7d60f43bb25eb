"""A rank that trains nothing: it writes metrics, obeys `control/stop`, and fails as `FAKE_FAIL` says.

`FAKE_FAIL=1:exit42@2` makes rank 1 leave with code 42 at step 2; other ways are `raise` and `kill`.
`FAKE_FAIL_SEED` limits that to one seed, `FAKE_SLEEP` is the time of a step, `1/2` in the first attempt and
later, `FAKE_DEAF=1` hears no stop.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

from src.trainer.worker import die_with_parent, fail

RANK = int(os.environ["RANK"])


def line(step: int, attempt: int, seed: int) -> str:
    record = {
        "schema": 1,
        "step": step,
        "attempt": attempt,
        "time": time.time(),
        "loss": 4.0 / step + seed / 8,
        "grad_norm": 1.0 / step,
        "aux_loss": None,
        "lr": 1e-3,
        "tokens_total": 100 * step,
        "step_time": 0.05,
        "tokens_per_s": 2000.0 if step > 2 else None,
        "moe": {"layers": {"1": {"max_over_mean": 1.5, "dead": 1, "load": [0.5, 0.25, 0.25, 0.0]}}},
    }
    return json.dumps(record) + "\n"


def meet(run: Path, step: int) -> bool:
    """Wait for all ranks, as a collective does, and fail as one does when a rank stays away.

    False if rank 0 has stopped instead, which real ranks agree on.
    """
    (run / "control" / f"at.{RANK}.{step}").touch()
    started = time.monotonic()
    for rank in range(int(os.environ["WORLD_SIZE"])):
        while not (run / "control" / f"at.{rank}.{step}").exists():
            time.sleep(0.01)
            if (run / "control" / "requeue").exists():
                return False
            if time.monotonic() - started > float(os.environ.get("FAKE_PATIENCE", "5")):
                raise ConnectionError("Connection closed by peer")
    return True


def failing(how: str) -> None:
    if how.startswith("exit"):
        sys.stdout.flush()
        os._exit(int(how[4:]))
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError(f"rank {RANK} broke")


def train(run: Path) -> None:
    attempt = int(os.environ["MANYHEAD_ATTEMPT"])
    config = (run / "config.yaml").read_text()
    steps, seed = (int(re.search(rf"^{key}: (\d+)$", config, re.M)[1]) for key in ("max_steps", "seed"))
    done = run / "fake_step"
    first = int(done.read_text()) + 1 if done.exists() else 1
    rank, _, how = os.environ.get("FAKE_FAIL", "").partition(":")
    how, _, at = how.partition("@")
    if os.environ.get("FAKE_FAIL_SEED", str(seed)) != str(seed):
        rank = "none"
    pauses = os.environ.get("FAKE_SLEEP", "0.01").split("/")
    pause = float(pauses[min(attempt, len(pauses)) - 1])
    print(
        f"rank {RANK} pid {os.getpid()} threads {os.environ['OMP_NUM_THREADS']} from step {first}",
        f"master {os.environ.get('MASTER_ADDR')}",
        flush=True,
    )
    for step in range(first, steps + 1):
        if not meet(run, step):
            return
        time.sleep(pause)
        if rank == str(RANK) and step == int(at or 1):
            failing(how)
        if RANK == 0:
            with (run / "metrics.jsonl").open("a") as file:
                file.write(line(step, attempt, seed))
            done.write_text(str(step))
        if RANK == 0 and (run / "control" / "stop").exists() and "FAKE_DEAF" not in os.environ:
            (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)
            (run / "control" / "requeue").write_text("saved\n")
            return


if __name__ == "__main__":
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        train(Path(sys.argv[1]))
    except Exception as error:
        fail(Path(sys.argv[1]), RANK, error, error.__traceback__)
