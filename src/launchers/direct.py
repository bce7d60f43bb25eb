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
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from src import runs
from src.code_identity import code_record
from src.compose import compose, dump_config, load_config
from src.config import SCHEDULERS, Config
from src.digest import config_digest
from src.errors import Problem, UserError
from src.launchers import node
from src.launchers.bar import Display
from src.launchers.batch import settle_nodes
from src.launchers.environment import Environment, Setting, cache_root, cores, rank_environment
from src.launchers.launch import Launch, check_log_copy, finish, log_files, papers, prepare_for
from src.launchers.outcome import node_records
from src.launchers.places import Place, role
from src.launchers.plan import check_memory, dry_run_text, make_plan
from src.launchers.settle import settle
from src.launchers.watch import LOOK, Ended, Screen
from src.machine import find_machine
from src.status import Status

WAIT = timedelta(hours=1)
"""How long ranks wait for rank 0, which may be preparing data."""
RECORDS = 10.0
"""Seconds that the first node waits for the records of the others."""


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
    if config.launcher.name in SCHEDULERS:
        message = (
            f"launcher={config.launcher.name} inside of {place.source}, which has started the ranks already"
        )
        raise UserError([Problem("launcher", message, "type launcher=local or direct", "DIRECT-5")])
    kind = role(place, config)
    launch = Launch(config, overrides)
    plan = make_plan(config, overrides)
    if config.dry_run:
        print(dry_run_text(plan))
        return 0
    check_memory(plan)
    check_log_copy(config)
    code = code_record()
    claim = runs.claim(config, code, plan.data_key)
    for note in claim.notes:
        launch.console.line(note)
    if claim.finished:
        return 0
    launch.console.line(f"run        {claim.path}, {kind} 0 of {place.tasks} of {place.source}")
    status = Status("running", claim.attempt, config_digest(config))
    try:
        environment = environment_of(config, place, kind)
        runs.begin_attempt(claim, papers(launch, plan, environment, code, plan.data_key))
        log_files(launch, claim.path)
        status.write(claim.path)
        prepare_for(launch, claim.path, status)
    except BaseException:
        claim.release()
        raise
    os.environ.update({**environment.values, **place.variables(claim.attempt)})
    return Opened(launch, claim, status, kind)


def environment_of(config: Config, place: Place, kind: str) -> Environment:
    """The variables of a rank of this node (ENV)."""
    ranks = place.local_tasks if kind == "rank" else config.mesh.world // place.tasks
    setting = Setting(
        config,
        find_machine(config).platform,
        ranks,
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
                code = node.run_share(run, place.tasks, place.rank, place.address)
                await_records(run, place.tasks)
                settle_nodes(opened.status, run, code, launch.config.mesh.world)
    finally:
        opened.claim.release()
        del store
    opened.status.ended = time.time()
    opened.status.write(run)
    finish(launch, run, opened.status)
    assert opened.status.exit_code is not None
    return opened.status.exit_code


def await_records(run: Path, nodes: int) -> None:
    """Wait a little for the records of the other nodes' agents."""
    end = time.monotonic() + RECORDS
    while len(node_records(run / "control")) < nodes and time.monotonic() < end:
        time.sleep(LOOK)


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


def publish(place: Place, message: dict[str, Any]) -> object:
    """Tell the other ranks; the store must be kept while they may still read."""
    store = open_store(place)
    store.set(key(), json.dumps(message))
    if "code" in message:
        for rank in range(1, place.tasks):
            with suppress(Exception):
                store.wait([f"{key()}/{rank}"], timedelta(seconds=RECORDS))
    return store


def key() -> str:
    """Key of the message; each start by torchrun has its own."""
    return f"manyhead/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/launch"


def open_store(place: Place) -> Any:
    """The store at which the ranks meet; rank 0 serves it where torchrun's agent does not."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    serves = place.rank == 0 and not place.has_store
    return TCPStore(place.address, place.port, None, serves, WAIT, wait_for_workers=False, multi_tenant=True)


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
    environment = environment_of(config, place, message["role"])
    os.environ.update({**environment.values, **place.variables(int(message["attempt"]))})
    words = [sys.executable, "-P", "-m", "src.launchers.direct", str(run), message["role"]]
    if message["role"] != "rank":
        words += [str(place.tasks), str(place.rank), place.address]
    sys.stdout.flush()
    os.execv(sys.executable, words)


def receive(run: Path, message: dict[str, Any]) -> Config:
    """The config, written here too where no file system is shared (DIRECT-1); refused (6) if it differs."""
    for name in ("control", "ranks"):
        (run / name).mkdir(parents=True, exist_ok=True)
    file = run / "config.yaml"
    if not file.is_file():
        file.write_text(message["config"], encoding="utf-8")
    config = load_config(file)
    found = config_digest(config)
    if found != message["digest"]:
        raise UserError(f"{file} has the digest {found[:12]}, rank 0 has {message['digest'][:12]}", code=6)
    return config


def main(run: str, kind: str, *numbers: str) -> int:
    """What a rank other than 0 is replaced by."""
    if kind != "rank":
        tasks, rank, address = numbers
        return node.run_share(Path(run), int(tasks), int(rank), address)
    log = Path(run) / "ranks" / f"rank_{int(os.environ['RANK']):05d}.log"
    with log.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
    become_rank(Path(run))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
