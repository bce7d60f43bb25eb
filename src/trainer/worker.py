"""One rank: `python -m src.trainer.worker RUN`, with the rank's numbers in the environment.

A rank that fails leaves at once: it writes its record under `RUN/control`, prints the traceback and ends by
`os._exit`, without draining collectives that wait for peers who may be gone (ENG-29).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from src.config import Config
from src.errors import UserError

PR_SET_PDEATHSIG = 1


def main(directory: Path, failed: Callable[[int, int], None] | None = None) -> None:
    """Train the run whose `config.yaml` lies in `directory`.

    Args:
        directory: the run's.
        failed: called with rank and code before this process leaves because of an error.
    """
    die_with_parent()
    rank = int(os.environ.get("RANK", "0"))
    try:
        threading.excepthook = lambda args: fail(
            directory, rank, args.exc_value or SystemExit(1), args.exc_traceback, failed
        )
        work(directory)
    except BaseException as error:
        fail(directory, rank, error, error.__traceback__, failed)


def work(directory: Path) -> None:
    """Load the config that the launching process wrote, join the others, train, leave a note if stopped."""
    from src.compose import load_config
    from src.trainer.loop import train
    from src.trainer.parallel.timeouts import naming_the_absent
    from src.trainer.runtime import start
    from src.trainer.stop import StopRequest

    stop = StopRequest(directory / "control").install()
    config = load_config(directory / "config.yaml")
    runtime = start(config)
    describe(directory, config, runtime.rank)
    attempt = int(os.environ.get("MANYHEAD_ATTEMPT", "1"))
    with naming_the_absent(runtime, config.launcher.collective_timeout):
        stopped = train(config, directory, attempt, runtime, stop)
    if stopped and runtime.rank == 0:
        (directory / "control" / "requeue").write_text("stopped on request, state saved\n")
    runtime.close()


def describe(directory: Path, config: Config, rank: int) -> None:
    """The first line of a rank's log: what it runs (LOG-4); `kernels.json` says what `auto` chose."""
    import torch

    from src.compose import config_digest

    code_path = directory / "code.json"
    code = json.loads(code_path.read_text()) if code_path.exists() else {}
    print(
        f"rank {rank} pid {os.getpid()} config {config_digest(config)[:12]} commit {code.get('commit')} "
        f"data {code.get('data_key')} kernels {config.kernels.name} torch {torch.__version__} "
        f"threads {torch.get_num_threads()}",
        flush=True,
    )


def die_with_parent() -> None:
    """Ask the kernel to end this process when the agent that started it dies (ELA-3); Linux only."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def fail(
    directory: Path,
    rank: int,
    error: BaseException,
    trace: TracebackType | None,
    failed: Callable[[int, int], None] | None = None,
) -> None:
    """Write `control/error.<rank>.json`, print the cause and leave with its code."""
    code = exit_code(error)
    text = "".join(traceback.format_exception(type(error), error, trace))
    record = {
        "time": time.time(),
        "rank": rank,
        "type": type(error).__name__,
        "message": str(error),
        "traceback": text,
        "code": code,
    }
    try:
        control = directory / "control"
        control.mkdir(exist_ok=True)
        temporary = control / f".error.{rank}.json"
        temporary.write_text(json.dumps(record))
        temporary.rename(control / f"error.{rank}.json")
        if failed is not None:
            failed(rank, code)
    finally:
        print(str(error) if isinstance(error, UserError) else text, file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(code)


def exit_code(error: BaseException) -> int:
    """The code of EXIT that an error ends in."""
    if isinstance(error, UserError):
        return error.code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if type(error).__name__ in {"DistBackendError", "DistNetworkError", "DistStoreError"}:
        return 6
    return 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
