"""The agent of one node of a job, one task a node, started by srun: `python -m src.launchers.node RUN`.

It starts the node's ranks as a local launch does, asks them to save when the scheduler wants the node back,
and leaves `control/node.<k>.json`: srun's own code says little about who failed first (AGENT-1 to 4).
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.compose import load_config
from src.config import Config
from src.durations import seconds
from src.errors import UserError
from src.launchers import hostlist
from src.launchers.console import Console
from src.launchers.environment import Environment, Setting, cache_root, cores, rank_environment
from src.launchers.node_data import ensure_data
from src.launchers.outcome import first_failure, has_failed
from src.launchers.ranks import WORKER, Meeting, applied, start
from src.launchers.roll_call import naming_the_absent
from src.launchers.spread import Spread, spread
from src.launchers.watch import Ended, Signals, Watcher
from src.machine import find_machine
from src.records import read_json, write_json
from src.runs import attempts

STEP_PORTS = 101
"""Distance between the ports of the config's store and of the agents, where srun starts agents directly."""
KILL_WAIT = 600.0
"""Seconds that a node which was told to end waits to be killed (AGENT-3)."""


@dataclass(frozen=True)
class Place:
    """Which node of which job this is."""

    node: int
    nodes: int
    first_host: str
    job: int


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


def run_share(run: Path, nodes: int, number: int, first_host: str) -> int:
    """Run one node's share of a launch that srun started without a job of ours; returns the node's code."""
    signals = Signals(scheduled=True)
    step = int(os.environ["SLURM_JOB_ID"]) + 7 * int(os.environ["SLURM_STEP_ID"])
    with signals.installed(), signals.collected():
        return settle_node(run, Place(number, nodes, first_host, step + STEP_PORTS), signals)


def settle_node(run: Path, place: Place, signals: Signals) -> int:
    """Run the ranks and write the node's record; returns the node's exit code."""
    record: dict[str, Any] = {"node": place.node, "host": socket.gethostname(), "codes": {}, "killed": False}
    try:
        ended = run_ranks(run, load_config(run / "config.yaml"), place, signals)
        record |= {"codes": ended.codes, "killed": ended.killed}
        failure = first_failure(run / "control", ended.codes, ended.killed)
        code, reason = (0, None) if failure is None else (failure.code, (failure.type, failure.message))
    except Exception as error:
        code, reason = error.code if isinstance(error, UserError) else 6, (type(error).__name__, str(error))
        print(f"node {place.node}: {reason[0]}: {reason[1]}", file=sys.stderr, flush=True)
    record |= {"code": code, "type": reason and reason[0], "message": reason and reason[1]}
    write_json(run / "control" / f"node.{place.node}.json", {"time": time.time(), **record})
    return code


def run_ranks(run: Path, config: Config, place: Place, signals: Signals) -> Ended:
    """Start this node's ranks, and watch them until all have ended."""
    share = Spread(place.nodes, config.mesh.world // place.nodes)
    if config.launcher.name == "slurm":
        share = spread(config, find_machine(config).platform)
    if share.nodes != place.nodes:
        raise UserError(f"the job has {place.nodes} nodes, its plan {share.nodes}", code=6)
    ensure_data(run, config, place.node)
    attempt = attempts(run)
    meeting = None if place.nodes == 1 else meet(place, config, attempt)
    environment = node_environment(config, share.ranks, meeting)
    if place.node == 0:
        write_json(run / "env.json", environment.json())
    variables = {**environment.values, "MANYHEAD_ATTEMPT": str(attempt)}
    worker = (read_json(run / "job.json") or {}).get("worker", WORKER)
    watcher = Watcher(run, config, Console(), signals)
    with applied(variables), naming_the_absent(run, place.node, place.nodes, config.launcher.timeout):
        return watcher.watch(lambda: start(run, share.ranks, worker, meeting))


def meet(place: Place, config: Config, attempt: int) -> Meeting:
    """Where the agents meet: the first host, at a port that differs between jobs (LOCAL-1, ELA-5)."""
    try:
        socket.getaddrinfo(place.first_host, None)
    except OSError as error:
        raise UserError(f"the first host {place.first_host} does not resolve: {error}", code=6) from error
    port = 12000 + (place.job + 7 * attempt) % 20000
    return Meeting(place.first_host, port, place.node, place.nodes, seconds(config.launcher.timeout))


def allotted() -> int:
    """Cores of this node's ranks: what Slurm gave their task, also where it binds nobody to them."""
    told = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return min(cores(), int(told)) if told.isdigit() and int(told) else cores()


def node_environment(config: Config, ranks: int, meeting: Meeting | None) -> Environment:
    """The variables of this node's ranks (ENV-3)."""
    setting = Setting(
        config=config,
        platform=find_machine(config).platform,
        ranks=ranks,
        cores=allotted(),
        cache=cache_root(config)[0],
        meeting=None if meeting is None else meeting.address,
    )
    return rank_environment(setting, os.environ)


def main() -> None:
    """`python -m src.launchers.node RUN`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="run directory")
    run_node(parser.parse_args().run)


if __name__ == "__main__":
    main()
