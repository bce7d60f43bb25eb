"""Starting the ranks of one machine and seeing how each of them ended.

A lone rank is a plain child: the launching process then needs no torch. Several are started by PyTorch's
elastic agent in a thread of this process, so that signals stay with our handlers in the main thread (ELA-2).
Either way a rank writes to its own log, and the same watcher looks at `codes` and `pids`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from src.launchers.environment import INHERITED

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

WORKER = "src.trainer.worker"
REDIRECT = 'exec >>"$0/ranks/rank_$(printf %05d "$RANK").log" 2>&1; exec "$@"'
"""Appends a rank's output to its log, whoever starts it; the shell becomes the rank."""
POLL = 0.1
"""Seconds between looks of the agent at its ranks."""


class Ranks(Protocol):
    """Running ranks."""

    def codes(self) -> dict[int, int] | None:
        """Exit code of each rank (−n: signal n) in the order of their ends; None while any runs."""

    def pids(self) -> list[int]:
        """Process ids of the ranks that were started."""

    def close(self) -> None:
        """Forget the ranks; all have ended."""


def rank_command(run: Path, worker: str) -> list[str]:
    """The command of every rank: its number is in the environment, only the directory travels (PLAN-3)."""
    return ["/bin/sh", "-c", REDIRECT, str(run), sys.executable, "-P", "-m", worker, str(run)]


@contextmanager
def applied(variables: Mapping[str, str]) -> Iterator[None]:
    """The environment with `variables` and without an outer launcher's numbers; put back on the way out."""
    before = dict(os.environ)
    for name in INHERITED:
        os.environ.pop(name, None)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def start(run: Path, world: int, worker: str = WORKER) -> Ranks:
    """Start `world` ranks of the run in this process's environment."""
    command = rank_command(run, worker)
    return LoneRank(command) if world == 1 else ElasticRanks(command, world)


class LoneRank:
    """The only rank of a run, as a child in a session of its own."""

    def __init__(self, command: list[str]) -> None:
        numbers = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        self._process = subprocess.Popen(command, env={**os.environ, **numbers}, start_new_session=True)

    def codes(self) -> dict[int, int] | None:
        """See `Ranks`."""
        code = self._process.poll()
        return None if code is None else {0: code}

    def pids(self) -> list[int]:
        """See `Ranks`."""
        return [self._process.pid]

    def close(self) -> None:
        """See `Ranks`."""


class ElasticRanks:
    """Ranks under PyTorch's elastic agent, without restarts, on a port that its store binds (LOCAL-1)."""

    def __init__(self, command: list[str], world: int) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="manyhead-agent-")
        self._agent = make_agent(command, world, self._directory.name)
        self._codes: dict[int, int] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(world,), name="agent", daemon=True)
        self._thread.start()

    def _run(self, world: int) -> None:
        try:
            result = self._agent.run()
            failures = {rank: failure.exitcode for rank, failure in result.failures.items()}
            self._codes = {**failures, **{rank: 0 for rank in range(world) if rank not in failures}}
        except BaseException as error:
            self._error = error

    def codes(self) -> dict[int, int] | None:
        """See `Ranks`; raises what the agent itself died of."""
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise self._error
        return self._codes

    def pids(self) -> list[int]:
        """See `Ranks`."""
        workers = self._agent.get_worker_group().workers
        return [int(worker.id) for worker in workers if worker.id is not None]

    def close(self) -> None:
        """See `Ranks`."""
        self._thread.join()
        self._directory.cleanup()


def make_agent(command: list[str], world: int, log_dir: str) -> LocalElasticAgent:
    """The agent that `torchrun` uses, with codes kept (ELA-1) and a rendezvous on the loopback device."""
    import logging

    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    address = "127.0.0.1"
    parameters = RendezvousParameters(
        "c10d", f"{address}:0", f"manyhead-{os.getpid()}", 1, 1, local_addr=address, is_host=True
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=world,
        entrypoint=command[0],
        args=tuple(command[1:]),
        rdzv_handler=get_rendezvous_handler(parameters),
        max_restarts=0,
        monitor_interval=POLL,
        local_addr=address,
    )
    return LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=log_dir))


def send(pids: list[int], number: signal.Signals) -> None:
    """Send a signal to the ranks' process groups; those that have ended are passed over."""
    for pid in pids:
        if is_child(pid):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)


def is_child(pid: int) -> bool:
    """Whether `pid` is still a child of this process and not another's that took its number (PLAN-6)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return not Path("/proc/self/stat").exists()
    return int(fields[1]) == os.getpid()
