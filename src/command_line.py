"""What `train.py` does with its arguments: help, one run, a dry run, or a sweep through Hydra's launcher."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from src.errors import Problem, UserError
from src.launchers.console import open_missing_streams, say, show_result
from src.launchers.places import Place, recognise

if TYPE_CHECKING:
    from src.config import Config


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code (EXIT); refusals are printed, all problems at once."""
    open_missing_streams()
    parsed = _parser().parse_intermixed_args(list(arguments))
    try:
        if parsed.help:
            return _help()
        if not parsed.shell_completion and not _is_silent():
            show_result(f"manyhead {_version()}: composing")
        return _run(parsed, list(arguments))
    except UserError as error:
        say(_refusal(error), sys.stderr)
        return error.code
    except KeyboardInterrupt:
        say("stopped by SIGINT while composing, nothing was started", sys.stderr)
        return 130


def _is_silent() -> bool:
    """Whether this is one of several processes, and not the first of them."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0"


def _parser() -> argparse.ArgumentParser:
    """Hydra's flags that make sense here, anywhere among the overrides (HYD-9).

    `--config-name` and the like are not among them: they would load a config past the schema (HYD-16).
    """
    parser = argparse.ArgumentParser("train.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--package", "-p")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument(
        "--info", "-i", choices=["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
    )
    parser.add_argument("--shell-completion", "-sc", action="store_true")
    parser.add_argument("overrides", nargs="*")
    return parser


def _help() -> int:
    from src.help import help_text

    show_result(help_text())
    return 0


def _run(parsed: argparse.Namespace, arguments: list[str]) -> int:
    flags = [word for word in arguments if word not in parsed.overrides]
    if parsed.shell_completion:
        return _completion(flags, parsed.overrides)
    place = recognise(os.environ, lambda: _node_rank_from(parsed.overrides))
    if place is not None:
        return _direct(place, parsed)
    if sum(map(bool, (parsed.multirun, parsed.cfg, parsed.info))) > 1:
        fix = "leave out all but one; dry_run=true shows the jobs of a sweep"
        raise UserError([Problem("-m, --cfg, --info", "do not go together", fix, "HYD-17")])
    if parsed.multirun or parsed.cfg or parsed.info:
        return _sweep(flags, parsed.overrides, parsed.multirun)
    return _single(parsed.overrides)


def _completion(flags: list[str], words: list[str]) -> int:
    """Answer a shell's `query=SHELL`; Hydra itself writes the scripts that ask it."""
    from src.completion import SEPARATORS, Completion
    from src.compose import config_loader

    verb, _, shell = words[0].partition("=") if len(words) == 1 else ("", "", "")
    if verb not in ("install", "uninstall", "query") or shell not in SEPARATORS:
        fix = f"type -sc install=SHELL or -sc uninstall=SHELL, SHELL one of {', '.join(SEPARATORS)}"
        raise UserError(
            [Problem("-sc", f"takes one verb and a shell, not {' '.join(words)!r}", fix, "HELP-2")]
        )
    if verb != "query":
        return _hydra(flags, words)
    with config_loader() as loader:
        print(SEPARATORS[shell].join(Completion(loader).answer(os.environ.get("COMP_LINE", ""))))
    return 0


def _node_rank_from(overrides: list[str]) -> str:
    """What a pod whose number is not given reads before rank 0 is known."""
    from src.compose import compose

    return compose(overrides).config.launcher.node_rank_from


def _direct(place: Place, parsed: argparse.Namespace) -> int:
    """One of several processes that srun or torchrun started: it becomes its rank."""
    if parsed.multirun or parsed.cfg or parsed.info:
        message = f"{place.source} started {place.tasks} processes, each of which would do the same"
        problem = Problem("arguments", message, f"type it without {place.source}", "DIRECT-5")
        if place.rank == 0:
            raise UserError([problem])
        return 2
    from src.launchers.direct import run_direct

    return run_direct(place, parsed.overrides)


def _single(overrides: list[str]) -> int:
    """Compose here rather than in `hydra.main`, which makes a directory and composes twice (HYD-18)."""
    from src.compose import compose
    from src.config import SCHEDULERS

    started = time.monotonic()
    composed = compose(overrides)
    config = composed.config
    is_remote = config.launcher.name in SCHEDULERS
    if composed.is_multirun != is_remote:
        return _mode(composed.is_multirun, overrides, config.launcher.name)
    if config.launcher.name == "direct":
        message = (
            "the environment names no rank: neither torchrun, srun with several tasks nor a pod started this"
        )
        raise UserError([Problem("launcher", message, "type launcher=local", "DIRECT-5")])
    if config.dry_run:
        return _dry_run(config, overrides, is_remote)
    seconds = time.monotonic() - started
    say(f"compose    {config.model.name} on {config.mesh.spec}, seed {config.seed} ({seconds:.1f} s)")
    if is_remote:
        from src.launchers.remote import run_job

        return run_job(config, overrides)
    from src.launchers.launch import run_one

    return run_one(config, overrides)


def _dry_run(config: Config, overrides: list[str], is_remote: bool) -> int:
    from src.launchers.plan import dry_run_text, make_plan

    plan = make_plan(config, overrides)
    if is_remote:
        from src.launchers.schedulers import scheduler_of

        show_result(scheduler_of(config).script(config, [plan]))
    show_result(dry_run_text(plan))
    return 0


def _mode(is_multirun: bool, overrides: list[str], launcher: str) -> int:
    """Hydra's mode was set apart from the launcher's: a sweep of one job, or a refusal."""
    if is_multirun:
        return _sweep(["--multirun"], overrides, multirun=True)
    fix = f"choose it as launcher={launcher}, and leave hydra.mode alone"
    message = f"launcher={launcher} submits jobs and trains nothing here"
    raise UserError([Problem("hydra.mode", message, fix, "PLAN-5")])


def _sweep(flags: list[str], overrides: list[str], multirun: bool) -> int:
    from src.compose import check_overrides

    check_overrides(overrides, multirun)
    return _hydra(flags, overrides)


def _hydra(flags: list[str], overrides: list[str]) -> int:
    """Hand over to Hydra, whose launcher plugin runs the jobs and leaves by `SystemExit` if one failed."""
    import hydra

    from src.compose import CONF, FAILURES, ROOT, register

    register()
    with tempfile.TemporaryDirectory(prefix="manyhead-hydra-") as scratch:
        places = [f"hydra.run.dir={scratch}", f"hydra.sweep.dir={scratch}"]
        words = [*flags, *overrides, *([] if "-sc" in flags or "--shell-completion" in flags else places)]
        with _arguments(words):
            try:
                hydra.main(version_base="1.3", config_path=str(CONF), config_name=ROOT)(_never)()
            except FAILURES as error:
                raise UserError([Problem("composition", str(error))]) from error
            except SystemExit as stop:
                return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    return 0


def _never(cfg: object) -> NoReturn:
    """What Hydra would call in this process: never, for a job is a process of its own (HYD-11, HYD-12)."""
    fix = "choose where jobs run by launcher=, and leave hydra/launcher alone"
    raise UserError([Problem("hydra/launcher", "would train in the launching process", fix, "SWEEP-7")])


@contextmanager
def _arguments(words: list[str]) -> Iterator[None]:
    """Arguments for Hydra, which reads them from `sys`; its errors reach us, not its own exit (HYD-17)."""
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = [sys.argv[0], *words], "1"
    try:
        yield
    finally:
        sys.argv = before[0]
        if before[1] is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before[1]


def _refusal(error: UserError) -> str:
    many = len(error.problems)
    head = f"refused, {many} problem{'s' * (many > 1)}:\n" if many else "refused: "
    return f"{head}{error}"


def _version() -> str:
    try:
        return version("manyhead")
    except PackageNotFoundError:
        return f"in {Path(__file__).resolve().parent.parent}"
