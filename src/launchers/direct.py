"""The environment already names the rank: this process becomes it (DIRECT).

Rank 0 composes, opens the attempt and publishes the config's text through the ranks' store. The others read
it there and are replaced by a fresh interpreter, so that their variables are set before torch is imported.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from src import runs
from src.code_identity import code_record
from src.compose import compose, dump_config, load_config
from src.config import Config
from src.digest import config_digest
from src.errors import Problem, UserError
from src.launchers import node
from src.launchers.bar import Display
from src.launchers.batch import settle_nodes
from src.launchers.caches import cache_root
from src.launchers.direct_store import await_records, key, open_store, publish, send_records
from src.launchers.environment import Environment, Setting, cores, rank_environment
from src.launchers.launch import Launch, check_log_copy, check_tuning, finish, log_files, papers, prepare_for
from src.launchers.places import Place, role
from src.launchers.plan import check_memory, dry_run_text, make_plan
from src.launchers.settle import settle
from src.launchers.storage import check_storage
from src.launchers.watch import LOOK, Ended, Screen
from src.machine import ask_driver, find_machine
from src.records import write_atomic
from src.status import Status

STEP_PORTS = 101
"""Distance between the ports of the config's store and of the agents, where srun starts agents."""


@dataclass
class Opened:
    """An attempt that rank 0 has opened."""

    launch: Launch
    claim: runs.Claim
    status: Status
    role: str

    def message(self) -> dict[str, Any]:
        """What the other ranks are told."""
        return {
            "run": str(self.claim.path),
            "config": dump_config(self.launch.config),
            "digest": config_digest(self.launch.config),
            "attempt": self.claim.attempt,
            "role": self.role,
        }


def run_direct(place: Place, overrides: list[str]) -> int:
    """Run this process's part of the launch and return its exit code."""
    node.check_address(place.address)
    if place.rank > 0:
        return join(place)
    try:
        opened = lead(place, overrides)
    except UserError as error:
        publish(place, {"code": error.code})
        raise
    except BaseException:
        publish(place, {"code": 1})
        raise
    if isinstance(opened, int):
        publish(place, {"code": opened})
        return opened
    return first_rank(place, opened)


def lead(place: Place, overrides: list[str]) -> Opened | int:
    """Compose, find the directory and open the attempt; a code where there is nothing to run."""
    config = compose(overrides).config
    if config.launcher.name not in ("local", "direct"):
        message = (
            f"launcher={config.launcher.name} inside of {place.source}, which has started the ranks already"
        )
        raise UserError([Problem("launcher", message, "type launcher=local or direct", "DIRECT-5")])
    if config.container.name != "none":
        message = f"{config.container.name}, but {place.source} has started the ranks already"
        fix = f"put the container around what {place.source} starts, and type container=none"
        raise UserError([Problem("container", message, fix, "CONT-1")])
    check_storage(config)
    kind = role(place, config)
    launch = Launch(config, overrides)
    machine = find_machine(config)
    plan = make_plan(config, overrides, machine if config.dry_run else ask_driver(machine))
    if config.dry_run:
        print(dry_run_text(plan))
        return 0
    check_memory(plan)
    check_log_copy(config)
    check_tuning(config)
    code = code_record()
    claim = runs.claim(config, code, plan.data_key)
    for note in claim.notes:
        launch.console.line(note)
    if claim.finished:
        return 0
    launch.console.line(f"run        {claim.path}, {kind} 0 of {place.tasks} of {place.source}")
    status = Status("running", claim.attempt, config_digest(config))
    try:
        environment = environment_of(config, place) if kind == "rank" else None
        runs.begin_attempt(claim, papers(launch, plan, environment, code, plan.data_key))
        log_files(launch, claim.path)
        status.write(claim.path)
        if environment is not None:
            environment.apply(claim.attempt)
            os.environ.update(place.variables(claim.attempt))
        prepare_for(launch, claim.path, status)
    except BaseException:
        claim.release()
        raise
    return Opened(launch, claim, status, kind)


def environment_of(config: Config, place: Place) -> Environment:
    """The variables of a rank of this node (ENV); an agent finds those of its ranks itself."""
    setting = Setting(
        config,
        find_machine(config).platform,
        place.local_tasks,
        cores=cores(),
        cache=cache_root(config)[0],
        meeting=place.address if place.nodes > 1 else None,
    )
    return rank_environment(setting, os.environ)


def first_rank(place: Place, opened: Opened) -> int:
    """Publish, then be rank 0 or the first node's agent; settles `status.json` and reports."""
    run, launch = opened.claim.path, opened.launch
    store = publish(place, opened.message())
    try:
        with Showing(run, launch):
            if opened.role == "rank":
                become_rank(run)
                settle(opened.status, run, Ended({0: 0}, None, killed=False))
            else:
                code = node.run_share(run, node_place(place))
                await_records(run, place.tasks, store)
                settle_nodes(opened.status, run, code, launch.config.mesh.world)
    finally:
        opened.claim.release()
        del store
    opened.status.ended = time.time()
    opened.status.write(run)
    finish(launch, run, opened.status)
    assert opened.status.exit_code is not None
    return opened.status.exit_code


def node_place(place: Place) -> node.Place:
    """Which agent this process is, and where agents meet: a pod has one port, a step of srun the job's."""
    if place.per_node is not None:
        return node.Place(place.rank, place.tasks, place.address, port=place.port)
    step = int(os.environ["SLURM_JOB_ID"]) + 7 * int(os.environ["SLURM_STEP_ID"])
    return node.Place(place.rank, place.tasks, place.address, step + STEP_PORTS)


class Showing:
    """Shows the steps from a thread while this process trains."""

    def __init__(self, run: Path, launch: Launch) -> None:
        self._screen, self._launch = Screen(run, launch.config, launch.console), launch
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        with Display(self._launch.console) as display:
            while not self._over.wait(LOOK):
                self._screen.show(display)
            self._screen.show(display)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


def become_rank(run: Path) -> None:
    """Train as the rank that the environment names; returns at its end, leaves by `os._exit` on a failure."""
    from src.trainer import worker

    worker.main(run, failed=lambda rank, code: write_failure(run, rank, code))


def write_failure(run: Path, rank: int, code: int) -> None:
    """A failing rank writes the status, for rank 0 may be gone; the earliest record decides."""
    status = Status.read(run)
    if status is not None:
        settle(status, run, Ended({rank: code}, None, killed=False))
        status.ended = time.time()
        status.write(run)


def join(place: Place) -> int:
    """Read what rank 0 publishes, and be replaced by a process that has the right variables."""
    store = open_store(place)
    message = json.loads(store.get(key()))
    store.set(f"{key()}/{place.rank}", "read")
    if "code" in message:
        return int(message["code"])
    run = Path(message["run"])
    config = receive(run, message)
    if place.local_rank == 0 and config.data.kind != "synthetic":
        from src.trainer.data.prepare import prepare

        prepare(config, lambda text: None)
    words = [sys.executable, "-P", "-m", "src.launchers.direct", str(run)]
    if message["role"] == "rank":
        os.environ.update(environment_of(config, place).of_ranks(int(message["attempt"])))
        os.environ.update(place.variables(int(message["attempt"])))
    else:
        words.append(json.dumps(asdict(place)))
    sys.stdout.flush()
    os.execv(sys.executable, words)


def receive(run: Path, message: dict[str, Any]) -> Config:
    """The config, written here too where no file system is shared (DIRECT-1); refused (6) if it differs."""
    for name in ("control", "ranks"):
        (run / name).mkdir(parents=True, exist_ok=True)
    file = run / "config.yaml"
    if not file.is_file() or file.read_text(encoding="utf-8") != message["config"]:
        write_atomic(file, message["config"])
    config = load_config(file)
    found = config_digest(config)
    if found != message["digest"]:
        raise UserError(f"{file} has the digest {found[:12]}, rank 0 has {message['digest'][:12]}", code=6)
    return config


def main(run: Path, agent: str | None = None) -> int:
    """What a process other than the first is replaced by: a rank, or the agent at a place."""
    if agent is not None:
        place = Place(**json.loads(agent))
        code = node.run_share(run, node_place(place))
        send_records(run, place)
        return code
    log = run / "ranks" / f"rank_{int(os.environ['RANK']):05d}.log"
    with log.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
    become_rank(run)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), *sys.argv[2:]))
