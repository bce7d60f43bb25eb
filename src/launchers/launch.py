"""One run on this machine, from a validated config to its closing screen and exit code."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from src import runs
from src.code_identity import CodeRecord, code_diff, code_record
from src.compose import dump_config
from src.config import Config, KernelsConfig
from src.digest import config_digest
from src.errors import Problem, UserError
from src.launchers.caches import cache_root, seated
from src.launchers.checks import check_before_ranks
from src.launchers.closing import closing_screen
from src.launchers.console import Console
from src.launchers.contained import SLACK, Contained, Inside, cache_base, check_container
from src.launchers.container import is_wrapped
from src.launchers.environment import (
    Environment,
    Setting,
    cores,
    rank_environment,
    unknown_names,
)
from src.launchers.plan import LaunchPlan, check_memory, make_plan
from src.launchers.ranks import WORKER, applied, start
from src.launchers.settle import fail, settle
from src.launchers.storage import check_storage
from src.launchers.watch import Ended, Interrupted, Screen, Signals, Watcher
from src.machine import ask_driver, find_machine, pinned
from src.models import twin
from src.records import LineReader
from src.report_facts import overrides_text
from src.runs import Claim
from src.status import Status, last_step
from src.trainer.checkpoint.directory import steps

TAIL = 15
"""Lines of a rank's log that are shown where nothing else says why it died."""


FROM_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE)
"""Errors whose traceback tells a user nothing more; nor does any, once the whole directory is gone."""


@dataclass
class Launch:
    """What one launching process works with."""

    config: Config
    overrides: list[str]
    worker: str = WORKER
    """Module that a rank runs."""
    jobs: int = 1
    """Jobs of the same sweep that run side by side on this machine."""
    seat: int = 0
    """Which of them this is."""
    console: Console = field(default_factory=Console)
    signals: Signals = field(default_factory=Signals)


def run_one(config: Config, overrides: list[str], worker: str = WORKER, jobs: int = 1, seat: int = 0) -> int:
    """Train one run to its end and return its exit code (EXIT); refusals are printed, not raised.

    Args:
        config: resolved and valid.
        overrides: the command line's overrides, for the record and the next commands.
        worker: module that each rank runs as `python -m <worker> RUN`.
        jobs: jobs of a sweep beside this one, itself included; they share the cores.
        seat: which of them this is; each has compiler caches of its own.
    """
    config = pinned(config) if is_wrapped(config) else config
    return guarded(Launch(config, overrides, worker, jobs, seat), find_and_run)


def guarded(launch: Launch, body: Callable[[Launch], int]) -> int:
    """The exit code of `body`, with signals handled and refusals printed."""
    with launch.signals.installed():
        try:
            return body(launch)
        except UserError as error:
            launch.console.error(str(error))
            return error.code
        except Interrupted as stop:
            launch.console.error(f"stopped by {stop} before the ranks started")
            return 128 + stop.number
        except OSError as error:
            if error.errno not in FROM_THE_DISK and Path(launch.config.paths.runs).is_dir():
                raise
            launch.console.error(
                f"the run's files cannot be written: {error}; status.json may be out of date"
            )
            return 1


def find_and_run(launch: Launch) -> int:
    """Refuse what cannot fit, find the run directory, and train in it unless it is finished."""
    console = launch.console
    for warning in unknown_names(os.environ):
        console.error(warning)
    check_storage(launch.config)
    with console.phase("plan") as words:
        plan = make_plan(launch.config, launch.overrides, ask_driver(find_machine(launch.config)))
        words += [twin.words(plan.match)] if plan.match else []
        check_memory(plan)
        check_log_copy(launch.config)
        check_container(launch.config)
        check_kernels(launch.config, plan.platform)
        check_tuning(launch.config)
    for notice in plan.notices:
        console.line(f"notice     {notice}")
    with console.phase("run") as words:
        code, key = code_record(), plan.data_key
        taken = runs.claim(launch.config, code, key)
        words.append(str(taken.path))
    for note in taken.notes:
        console.line(note)
    if taken.finished:
        return 0
    console.line(f"metrics    {taken.path / 'metrics.jsonl'}")
    try:
        return attempt(launch, taken, plan, code, key)
    finally:
        taken.release()


def attempt(launch: Launch, taken: Claim, plan: LaunchPlan, code: CodeRecord, key: str | None) -> int:
    """One attempt at the run: write its papers, prepare, run the ranks, settle `status.json`, report."""
    status = Status("running", taken.attempt, config_digest(launch.config))
    imports_agent = launch.config.mesh.world > 1 and not is_wrapped(launch.config)
    importing = import_agent_early() if imports_agent else None
    try:
        with failures_in(status):
            environment = describe_environment(launch)
            runs.begin_attempt(taken, papers(launch, plan, environment, code, key))
            log_files(launch, taken.path)
            status.write(taken.path)
            check_before_ranks(launch.config, taken.path / "control", 0, launch.console.line)
            prepare_data(launch)
            if importing is not None:
                importing.join()
            ended = run_ranks(launch, taken, environment)
            settle(status, taken.path, ended)
    finally:
        status.last_step, status.ended = last_step(taken.path), time.time()
        status.write(taken.path)
    finish(launch, taken.path, status)
    assert status.exit_code is not None
    return status.exit_code


@contextmanager
def failures_in(status: Status) -> Iterator[None]:
    """Whatever ends the body before the ranks have started becomes the failure of `status`, and goes on."""
    try:
        yield
    except UserError as error:
        fail(status, error.code, "UserError", str(error))
        raise
    except Interrupted as stop:
        fail(status, 128 + stop.number, "Signal", f"{stop} before the ranks started", stop.number)
        raise
    except Exception as error:
        fail(status, 1, type(error).__name__, str(error))
        raise


def prepare_for(launch: Launch, run: Path, status: Status) -> None:
    """Build the data of an attempt that is written already; a failure is left in its `status.json`."""
    try:
        with failures_in(status):
            prepare_data(launch)
    finally:
        if status.state == "failed":
            status.ended = time.time()
            status.write(run)


def import_agent_early() -> threading.Thread:
    """Import the elastic agent, the slowest part of a start, in a thread while data is prepared."""

    def work() -> None:
        import torch.distributed.elastic.agent.server.local_elastic_agent  # noqa: F401

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def prepare_data(launch: Launch) -> None:
    """Build the token artifact if it is missing (exit 4 on failure); synthetic data has none."""
    if launch.config.data.kind == "synthetic":
        return
    from src.trainer.data.prepare import prepare

    with launch.console.phase("data") as words:
        prepared = prepare(launch.config, launch.console.line)
        words.append(f"{'built' if prepared.built else 'found'} {prepared.path}")


def describe_environment(launch: Launch) -> Environment:
    """The variables of the ranks, made up once here (ENV-3)."""
    cache, warning = cache_root(launch.config)
    if warning is not None:
        launch.console.error(warning)
    setting = Setting(
        config=launch.config,
        platform=find_machine(launch.config).platform,
        ranks=launch.config.mesh.world,
        jobs=launch.jobs,
        cores=cores(),
        cache=seated(cache, launch.seat),
    )
    return rank_environment(setting, os.environ)


def papers(
    launch: Launch, plan: LaunchPlan, environment: Environment | None, code: CodeRecord, key: str | None
) -> dict[str, str]:
    """The files that describe an attempt, by name (RUN); the environment of a job is known on its nodes."""
    files = {
        "config.yaml": dump_config(launch.config),
        "overrides.yaml": overrides_text(launch.overrides),
        "plan.json": json.dumps(replace(plan, jobs=launch.jobs).json(), indent=2) + "\n",
        "code.json": json.dumps({**code.json(), "data_key": key}, indent=2) + "\n",
        "code.diff": code_diff(),
    }
    if environment is not None:
        files["env.json"] = json.dumps(environment.json(), indent=2) + "\n"
    return files


def check_log_copy(config: Config) -> None:
    """Raise `UserError` (3) before any work if the log cannot be copied to `logger.copy_to` (law 6)."""
    if config.logger.copy_to is None:
        return
    try:
        with open(config.logger.copy_to, "a", encoding="utf-8"):
            pass
    except OSError as error:
        message = f"{config.logger.copy_to} cannot be written: {error.strerror}"
        fix = "name a file in a directory that is there, or leave it out: launcher.log has the same lines"
        raise UserError([Problem("logger.copy_to", message, fix, "LOG-5")], code=3) from error


def check_kernels(config: Config, platform: str) -> None:
    """Raise `UserError` (3) before any work if a CPU cannot run what `kernels` names (REG-2).

    A GPU is asked by its ranks, before the first step: asked from here it would hold memory all the while.
    """
    if platform != "cpu" or config.kernels in (KernelsConfig("auto"), KernelsConfig("eager")):
        return
    if is_wrapped(config):
        return
    import torch

    from src.trainer.backends.registry import backend_class

    backend_class(config.backend.name).choose_ops(config, torch.device("cpu"))


def check_tuning(config: Config) -> None:
    """Raise `UserError` (3) before any work if the file of tuned products is missing (TUNE-2)."""
    path = config.kernels.gemm_tuning
    if path != "none" and not Path(path).is_file():
        fix = "measure with scripts/tune_gemm.py, or kernels.gemm_tuning=none"
        raise UserError([Problem("kernels.gemm_tuning", f"{path} does not exist", fix, "TUNE-2")], code=3)


def log_files(launch: Launch, run: Path) -> None:
    """The console's lines go to `launcher.log`, and to `logger.copy_to`."""
    copy = launch.config.logger.copy_to
    launch.console.log_to(run / "launcher.log", *([Path(copy)] if copy else []))


def run_ranks(launch: Launch, taken: Claim, environment: Environment) -> Ended:
    """Start the ranks and wait for the last of them."""
    world = launch.config.mesh.world
    wrapped = is_wrapped(launch.config)
    where = f"in a container of {launch.config.container.name}" if wrapped else "on this machine"
    launch.console.line(f"ranks      {world} {where}, logs in {taken.path / 'ranks'}")
    screen = Screen(taken.path, launch.config, launch.console)
    if wrapped:
        return run_contained(launch, taken, screen)
    variables = environment.of_ranks(taken.attempt)
    watcher = Watcher(taken.path, launch.config, launch.console, launch.signals, screen)
    with applied(variables), launch.console.phase("train"):
        return watcher.watch(lambda: start(taken.path, world, launch.worker))


def run_contained(launch: Launch, taken: Claim, screen: Screen) -> Ended:
    """As `run_ranks`, with the agent in a container; the variables are made up there (CONT)."""
    told = Inside(cores(), cache_base(launch.config), launch.worker, launch.jobs, launch.seat)
    watcher = Watcher(taken.path, launch.config, launch.console, launch.signals, screen, SLACK)
    with launch.console.phase("train"):
        return watcher.watch(lambda: Contained(taken.path, launch.config, told, 0))


def finish(launch: Launch, run: Path, status: Status) -> None:
    """Report, and the last lines on the screen."""
    console = launch.console
    if status.last_step is not None:
        try:
            from src.report import write_report

            with console.phase("report") as words:
                words.append(str(write_report(run)))
        except (Exception, Interrupted) as error:
            console.line(f"no report: {type(error).__name__}: {error}")
    if status.state == "done":
        console.line(closing_screen(run, launch.overrides))
    elif status.state == "stopped":
        console.line(
            f"stopped after step {status.last_step}, state saved; the same command goes on from there"
        )
    else:
        console.error(failure_text(run, status))


def cause(reason: Mapping[str, str]) -> str:
    """Type and message of a failure; a refusal speaks for itself."""
    message = str(reason.get("message")).strip()
    return message if reason.get("type") == "UserError" else f"{reason.get('type')}: {message}"


def failure_text(run: Path, status: Status) -> str:
    """The last words on a failed run; the end of its log for a rank other than 0 that left no record."""
    reason, rank = status.reason or {}, status.first_failing_rank
    where = "" if rank is None else f" on rank {rank}"
    lines = [f"failed with code {status.exit_code}{where}: {cause(reason)}"]
    if rank and not (run / "control" / f"error.{rank}.json").exists():
        log = LineReader(run / "ranks" / f"rank_{rank:05d}.log").new_lines()
        lines += [f"the end of rank {rank}'s log:", *(f"  {line}" for line in log[-TAIL:])]
    again = "goes on from the newest checkpoint" if steps(run) else "starts anew"
    lines += [f"logs: {run / 'ranks'}; the same command {again}"]
    return "\n".join(lines)
