"""The agent of one node of a job, one task a node, started by srun: `python -m src.launchers.node RUN`.

It starts the node's ranks as a local launch does, asks them to save when the scheduler wants the node back,
and leaves `control/node.<k>.json`: srun's own code says little about who failed first (AGENT-1 to 4).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from src.compose import load_config
from src.config import SCHEDULERS, Config
from src.durations import seconds
from src.errors import UserError
from src.launchers import hostlist
from src.launchers.beats import Beating
from src.launchers.caches import cache_root, seated
from src.launchers.checks import check_before_ranks
from src.launchers.console import Console
from src.launchers.contained import SLACK, Contained, Inside, cache_base
from src.launchers.container import is_wrapped
from src.launchers.environment import Environment, Setting, cores, rank_environment
from src.launchers.flags import is_signalled
from src.launchers.node_data import ensure_data
from src.launchers.outcome import first_failure, has_failed
from src.launchers.ranks import WORKER, Meeting, applied, start
from src.launchers.roll_call import naming_the_absent
from src.launchers.schedulers import scheduler_of
from src.launchers.spread import Spread, spread
from src.launchers.watch import Ended, Signals, Watcher
from src.machine import find_machine
from src.records import read_json, write_json
from src.runs import attempts

KILL_WAIT = 600.0
"""Seconds that a node which was told to end waits to be killed (AGENT-3)."""
HOST_GONE = 137
"""Code of an agent in a container whose host's side was killed; nobody is left to read it."""


@dataclass(frozen=True)
class Place:
    """Which node of which job this is."""

    node: int
    nodes: int
    first_host: str
    job: int = 0
    port: int | None = None
    """Where the agents meet; None follows from the job's number."""


def place_of(shell: Mapping[str, str]) -> Place:
    """The place that srun gave to its task; raises UserError (2) outside of a job."""
    try:
        hosts = shell.get("SLURM_STEP_NODELIST") or shell["SLURM_JOB_NODELIST"]
        node, nodes = int(shell["SLURM_PROCID"]), int(shell["SLURM_NTASKS"])
        return Place(node, nodes, hostlist.first(hosts), int(shell["SLURM_JOB_ID"]))
    except (KeyError, ValueError) as error:
        raise UserError(f"this is no task of srun: {error}") from error


def run_node(run: str) -> None:
    """Run this node's share of the ranks and leave the process with their code."""
    directory = Path(run)
    signals = Signals(scheduled=True)
    with signals.installed(), signals.collected():
        place = place_of(os.environ)
        code = settle_node(directory, place, signals)
        if signal.SIGTERM in signals.came and not has_failed(directory / "control"):
            time.sleep(KILL_WAIT)
    sys.stdout.flush()
    os._exit(code)


def run_share(run: Path, place: Place) -> int:
    """Run one node's share of a launch whose agents were started without a job of ours; returns its code."""
    signals = Signals(scheduled="SLURM_JOB_ID" in os.environ)
    with signals.installed(), signals.collected():
        return settle_node(run, place, signals)


def run_inside(run: str, inside: Inside) -> None:
    """Run a node's share as the agent in a container; and leave with its code, or with the host."""
    threading.Thread(target=leave_with_host, daemon=True).start()
    signals = Signals(scheduled=True)
    place = Place(inside.node, inside.nodes, inside.first_host, inside.job)
    with signals.installed(), signals.collected():
        code = settle_node(Path(run), place, signals, inside)
    sys.stdout.flush()
    os._exit(code)


def leave_with_host() -> None:
    """Leave at the end of standard input, which the host's side holds open; ranks end with their agent."""
    while os.read(0, 4096):
        pass
    os._exit(HOST_GONE)


def settle_node(run: Path, place: Place, signals: Signals, inside: Inside | None = None) -> int:
    """Run the ranks and write the node's record, but not into another attempt; returns the node's code."""
    attempt = attempts(run)
    record: dict[str, Any] = {"node": place.node, "host": socket.gethostname(), "codes": {}, "killed": False}
    try:
        ended = run_ranks(run, load_config(run / "config.yaml"), place, signals, inside)
        record |= {"codes": ended.codes, "killed": ended.killed}
        failure = first_failure(run / "control", ended.codes, ended.killed)
        code, reason = (0, None) if failure is None else (failure.code, (failure.type, failure.message))
    except Exception as error:
        code, reason = error.code if isinstance(error, UserError) else 6, (type(error).__name__, str(error))
        print(f"node {place.node}: {reason[0]}: {reason[1]}", file=sys.stderr, flush=True)
    record |= {"code": code, "type": reason and reason[0], "message": reason and reason[1]}
    if attempts(run) == attempt:
        write_json(run / "control" / f"node.{place.node}.json", {"time": time.time(), **record})
    return code


def run_ranks(
    run: Path, config: Config, place: Place, signals: Signals, inside: Inside | None = None
) -> Ended:
    """Start this node's ranks and watch them to their end; raises UserError (5) if the job is lost."""
    with watching(run, config, place.node, inside) as lost:
        ended = watch_ranks(run, config, place, signals, inside, lost)
    reason = lost()
    if reason is not None:
        raise UserError(reason, code=5)
    return ended


@contextmanager
def watching(
    run: Path, config: Config, node: int, inside: Inside | None
) -> Iterator[Callable[[], str | None]]:
    """Watch the job's other nodes where the scheduler does not (SPUR-5): why this one must end, or None."""
    if config.launcher.name != "spur" or inside is not None:
        yield lambda: None
        return
    with Beating(run, str(node), seconds(config.launcher.watchdog)) as beating:
        yield beating.lost


def watch_ranks(
    run: Path,
    config: Config,
    place: Place,
    signals: Signals,
    inside: Inside | None,
    lost: Callable[[], str | None],
) -> Ended:
    """Start this node's ranks, in a container if the config wants one, and watch them to their end."""
    share = Spread(place.nodes, config.mesh.world // place.nodes)
    is_submitted = config.launcher.name in SCHEDULERS  # Else nodes may share no directory.
    if is_submitted:
        share = spread(config, find_machine(config).platform)
    if share.nodes != place.nodes:
        raise UserError(f"the job has {place.nodes} nodes, its plan {share.nodes}", code=6)
    worker = (read_json(run / "job.json") or {}).get("worker", WORKER)
    if inside is None:
        check_before_ranks(config, run / "control", place.node, print)
        if is_submitted:
            ensure_data(run, config, place.node)
    if inside is None and is_wrapped(config):
        stop_before_limit(run, config, place)
        place_of_node = (place.node, place.nodes, place.first_host, place.job)
        told = Inside(allotted(), cache_base(config), worker, 1, 0, *place_of_node)
        watcher = Watcher(run, config, Console(), signals, slack=SLACK, lost=lost)
        return watcher.watch(lambda: Contained(run, config, told, place.node * share.ranks))
    attempt = attempts(run)
    meeting = None if place.nodes == 1 else meet(place, config, attempt)
    environment = node_environment(config, share.ranks, meeting, inside)
    if place.node == 0:
        write_json(run / "env.json", environment.json())
    variables = environment.of_ranks(attempt)
    chosen = worker if inside is None else inside.worker
    watcher = Watcher(run, config, Console(), signals, lost=lost)
    told_of = place.nodes if is_submitted else 1
    with applied(variables), naming_the_absent(run, place.node, told_of, config.launcher.timeout):
        return watcher.watch(lambda: start(run, share.ranks, chosen, meeting))


def stop_before_limit(run: Path, config: Config, place: Place) -> None:
    """Ask for a stop `launcher.grace` before a partition's own limit where no signal of Slurm does (AGENT-2).

    Only the queue knows that one; the watcher keeps `launcher.time`, if that is set.
    """
    if config.launcher.name != "slurm" or is_signalled(config) or config.launcher.time or place.node:
        return
    left = scheduler_of(config).time_left(str(place.job))
    if left is not None:
        stop = run / "control" / "stop"
        wait = max(0, left - seconds(config.launcher.grace))
        timer = threading.Timer(wait, stop.write_text, ["the time limit\n"])
        timer.daemon = True
        timer.start()


def meet(place: Place, config: Config, attempt: int) -> Meeting:
    """Where the agents meet: the first host, at a port that differs between jobs (LOCAL-1, ELA-5)."""
    check_address(place.first_host)
    port = place.port or 12000 + (place.job + 7 * attempt) % 20000
    return Meeting(place.first_host, port, place.node, place.nodes, seconds(config.launcher.timeout))


def check_address(host: str) -> None:
    """Raise `UserError` (6) at once where a name does not resolve: torch would try it for minutes (ELA-5)."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise UserError(f"the first host {host} does not resolve: {error}", code=6) from error


def allotted() -> int:
    """Cores of this node's ranks: what Slurm gave their task, also where it binds nobody to them."""
    told = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return min(cores(), int(told)) if told.isdigit() and int(told) else cores()


def node_environment(
    config: Config, ranks: int, meeting: Meeting | None, inside: Inside | None = None
) -> Environment:
    """The variables of this node's ranks (ENV-3)."""
    seat = 0 if inside is None else inside.seat
    if inside is not None:
        config = replace(config, paths=replace(config.paths, cache=inside.cache))
    cache = cache_root(config)[0]
    setting = Setting(
        config=config,
        platform=find_machine(config).platform,
        ranks=ranks,
        jobs=1 if inside is None else inside.jobs,
        cores=allotted() if inside is None else inside.cores,
        cache=seated(cache, seat),
        meeting=None if meeting is None else meeting.address,
    )
    return rank_environment(setting, os.environ)


def main() -> None:
    """`python -m src.launchers.node RUN`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="run directory")
    parser.add_argument("--inside", help="in a container: what its host tells, as JSON")
    arguments = parser.parse_args()
    if arguments.inside is None:
        run_node(arguments.run)
    else:
        run_inside(arguments.run, Inside(**json.loads(arguments.inside)))


if __name__ == "__main__":
    main()
