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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from src.launchers.environment import INHERITED

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.rendezvous import RendezvousParameters

WORKER = "src.trainer.worker"
REDIRECT = 'trap "" TERM USR1 USR2; exec >>"$0/ranks/rank_$(printf %05d "$RANK").log" 2>&1; exec "$@"'
"""Appends a rank's output to its log, whoever starts it; the shell becomes the rank.

A scheduler signals every process of a node, also while a rank is still importing. It must not die of that:
its agent has the request, and the rank finds `control/stop` after its first step."""
UNMOVED = ("/bin/sh", "-c", 'trap "" TERM USR1 USR2; exec "$0" "$@"')
"""Before an agent's interpreter: a warning that comes while it imports must not end it. What it misses so,
its own clock makes good (`watch.time_left`), and whoever preempts or cancels kills."""
EXIT_BARRIER = 30.0
"""Seconds that an agent whose ranks are done waits for the agents of other nodes."""
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


def rank_command(run: Path, worker: str, python: str = sys.executable) -> list[str]:
    """The command of every rank: its number is in the environment, only the directory travels (PLAN-3)."""
    return ["/bin/sh", "-c", REDIRECT, str(run), python, "-P", "-m", worker, str(run)]


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


@dataclass(frozen=True)
class Meeting:
    """Where the agents of several nodes meet, and which of them this one is."""

    address: str
    port: int
    node: int
    nodes: int
    timeout: int
    """Seconds that the agents wait for each other."""


def start(run: Path, ranks: int, worker: str = WORKER, meeting: Meeting | None = None) -> Ranks:
    """Start the `ranks` ranks of this node in this process's environment; without a meeting it is alone."""
    command = rank_command(run, worker)
    if meeting is None and ranks == 1:
        return LoneRank(command)
    return ElasticRanks(command, ranks, meeting)


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
    """Ranks under PyTorch's elastic agent, without restarts; alone on a port its store binds (LOCAL-1)."""

    def __init__(self, command: list[str], ranks: int, meeting: Meeting | None = None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="manyhead-agent-")
        first = 0 if meeting is None else meeting.node * ranks
        self._agent = make_agent(command, ranks, self._directory.name, meeting)
        self._codes: dict[int, int] | None = None
        self._error: BaseException | None = None
        numbers = range(first, first + ranks)
        self._thread = threading.Thread(target=self._run, args=(numbers,), name="agent", daemon=True)
        self._thread.start()

    def _run(self, numbers: range) -> None:
        try:
            result = self._agent.run()
            failures = {rank: failure.exitcode for rank, failure in result.failures.items()}
            self._codes = {**failures, **{rank: 0 for rank in numbers if rank not in failures}}
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


def make_agent(command: list[str], ranks: int, log_dir: str, meeting: Meeting | None) -> LocalElasticAgent:
    """The agent that `torchrun` uses, with codes kept (ELA-1)."""
    import logging

    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    parameters = rendezvous(meeting)
    spec = WorkerSpec(
        role="rank",
        local_world_size=ranks,
        entrypoint=command[0],
        args=tuple(command[1:]),
        rdzv_handler=get_rendezvous_handler(parameters),
        max_restarts=0,
        monitor_interval=POLL,
        master_addr=None if meeting is None else meeting.address,
        master_port=None if meeting is None else meeting.port,
        local_addr=parameters.local_addr,
    )
    return LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=log_dir), exit_barrier_timeout=EXIT_BARRIER)


def rendezvous(meeting: Meeting | None) -> RendezvousParameters:
    """Alone on the loopback device; several nodes with fixed ranks at the first node's address."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    name = f"manyhead-{os.getpid()}"
    if meeting is None:
        here = "127.0.0.1"
        return RendezvousParameters("c10d", f"{here}:0", name, 1, 1, local_addr=here, is_host=True)
    return RendezvousParameters(
        "static",
        f"{meeting.address}:{meeting.port}",
        "manyhead",
        meeting.nodes,
        meeting.nodes,
        local_addr=meeting.address if meeting.node == 0 else None,
        rank=meeting.node,
        timeout=meeting.timeout,
    )


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
