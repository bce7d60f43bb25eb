"""Commands in Markdown, and what is wrong with them, found by the parsers that will read them (DOC-1)."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from src import command_line
from src.compose import check_overrides, compose, compose_jobs, config_loader
from src.errors import EXIT_CODES, UserError
from src.launchers.plan import make_plan
from src.launchers.search_space import read_space
from src.script import script_values
from tests.docs.markdown import Document

ROOT = Path(__file__).resolve().parents[2]
SHELL = ("sh", "bash")
LANGUAGES = (*SHELL, "text", "mermaid", "yaml", "python", "json")
"""Every fence says what it holds, so that no command hides in an untagged one."""
PLAIN = ("ruff", "mypy", "pre-commit", "git", "cd")
"""Programs of others: only the paths they are given are looked at."""


STARTERS = ("srun", "torchrun")
"""Programs that start several processes of a command of ours."""


@dataclass(frozen=True)
class Command:
    """One command of a document."""

    words: tuple[str, ...]
    place: str
    exit_code: int = 0
    """What the document says it ends with, before any work."""

    @property
    def program(self) -> str:
        """Its first word that sets no variable."""
        return next((word for word in self.words if not is_variable(word)), "")

    @property
    def arguments(self) -> list[str]:
        """What follows the program."""
        return list(self.words[self.words.index(self.program) + 1 :])


class _Parsed(BaseException):
    """A script's parser has taken its arguments; carries what it made of them."""


def commands(document: Document) -> Iterator[Command]:
    """Commands of fences that hold a shell's lines, and of code spans that begin like one."""
    for fence in document.fences:
        if fence.language in SHELL:
            code = int(fence.note.removeprefix("exit ")) if fence.note.startswith("exit ") else 0
            lines = fence.text.replace("\\\n", "  ").splitlines()
            for number, line in enumerate(lines, fence.line):
                yield from split(line, document.at(number), code)
    for span in document.spans:
        if re.match(r"(python|pip|pytest|ruff|mypy|pre-commit|git) ", span.text):
            yield from split(span.text, document.at(span.line))


def split(line: str, place: str, exit_code: int = 0) -> Iterator[Command]:
    """The commands of one line: joined by `&&`, `;` or `|`, comments left out."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word in ("&&", ";", "|", "||"):
            if words:
                yield Command(tuple(words), place, exit_code)
            words = []
        else:
            words.append(word)


def is_variable(word: str) -> bool:
    """Whether a word sets a variable for the command that follows."""
    return re.match(r"[A-Z_]+=", word) is not None


def problems(command: Command, pytest_parser: Callable[[Sequence[str]], Any] | None = None) -> list[str]:
    """Everything wrong with a command, led by where it stands."""
    try:
        found = _check(command, pytest_parser)
    except UserError as error:
        found = [] if error.code == command.exit_code else [f"refused with {error.code}: {error}"]
    else:
        if command.exit_code == 2:
            found.append("is not refused")
    if command.exit_code not in EXIT_CODES:
        found.append(f"there is no exit code {command.exit_code}")
    return [f"{command.place}: {shlex.join(command.words)}: {problem}" for problem in found]


def _check(command: Command, pytest_parser: Callable[[Sequence[str]], Any] | None) -> list[str]:
    arguments = command.arguments
    missing = [f"{word} does not exist" for word in arguments if is_ours(word) and not (ROOT / word).exists()]
    if missing:
        return missing
    if command.program == "python":
        return _python(arguments)
    if command.program in STARTERS and "train.py" in arguments:
        return _train(arguments[arguments.index("train.py") + 1 :])
    if command.program == "pip":
        return _pip(arguments)
    if command.program == "pytest":
        return _pytest(arguments, pytest_parser)
    is_script = (ROOT / command.program).is_file()
    return [] if is_script or command.program in PLAIN else [f"unknown program {command.program}"]


def is_ours(word: str) -> bool:
    """Whether a word of a command line is a path into the checkout."""
    return re.match(r"(src|conf|scripts|tests|docs|hydra_plugins|\.ci)/", word) is not None


def _python(arguments: list[str]) -> list[str]:
    if not arguments:
        return ["runs nothing"]
    script, rest = arguments[0], arguments[1:]
    if script == "train.py":
        return _train(rest)
    if script == "-m":
        module = " ".join(rest[:1])
        path = ROOT / module.replace(".", "/")
        is_there = path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
        return [] if is_there else [f"unknown module {module}"]
    return _script(ROOT / script, rest) if (ROOT / script).is_file() else [f"{script} does not exist"]


def _train(words: list[str]) -> list[str]:
    """Parse, compose and plan, as `dry_run=true` would."""
    parsed, wrong = parse(lambda: command_line._parser().parse_intermixed_args(words))
    if wrong or parsed.help or parsed.shell_completion:
        return wrong
    overrides = [*parsed.overrides, *([] if "dry_run=true" in parsed.overrides else ["dry_run=true"])]
    if parsed.multirun:
        check_overrides(overrides, multirun=True)
        with config_loader() as loader:
            compose_jobs(loader, jobs(overrides))
        return []
    config = compose(overrides).config
    if not parsed.cfg and not parsed.info:
        make_plan(config, overrides)
    return []


def jobs(overrides: list[str]) -> list[list[str]]:
    """The jobs of a multirun, split as Hydra's own sweeper does; one that a search might try."""
    task = [word for word in overrides if not word.startswith("hydra")]
    if "hydra/sweeper=optuna" in overrides:
        return [read_space(task).corner()]
    parsed = OverridesParser.create().parse_overrides(task)
    batches: list[list[list[str]]] = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    return [job for batch in batches for job in batch]


def _pip(arguments: list[str]) -> list[str]:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = [
        name for word in arguments for names in re.findall(r"\.\[(.*)\]", word) for name in names.split(",")
    ]
    return [f"there is no extra {name}" for name in asked if name not in extras]


def _pytest(arguments: list[str], parser: Callable[[Sequence[str]], Any] | None) -> list[str]:
    """Options by pytest's own parser, markers by the project's list."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    names = {marker.partition(":")[0] for marker in known} | {"not", "and", "or"}
    given = [after for word, after in itertools.pairwise(arguments) if word == "-m"]
    wrong = [f"there is no marker {name}" for text in given for name in text.split() if name not in names]
    if parser is not None:
        _, unknown = parser(arguments)
        wrong += [f"pytest has no option {word}" for word in unknown if word.startswith("-")]
    return wrong


def _script(path: Path, words: list[str]) -> list[str]:
    """Let the script's own parser read the words, and stop it there; overrides among them are checked."""
    text = path.read_text(encoding="utf-8")
    if "ArgumentParser" not in text and "op_script" not in text:  # Those of one operation share a parser.
        return [f"{path.name} takes no arguments"] if words else []
    parsed, wrong = parse(lambda: run_to_parser(path, words))
    overrides = [*getattr(parsed, "overrides", [])] if parsed is not None else []
    if overrides:
        check_overrides(overrides, multirun=getattr(parsed, "multirun", False))
    return wrong


def run_to_parser(path: Path, words: list[str]) -> argparse.Namespace:
    """What the script's argparse parser makes of the words; nothing after it is run.

    The script's own values, a dataclass `Values`, are checked and taken out of the overrides (CFG-20).
    """
    spec = importlib.util.spec_from_file_location(f"documented_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up by name
    spec.loader.exec_module(module)
    with stop_at_parser(), patch.object(sys, "argv", [str(path), *words]):
        try:
            module.main()
        except _Parsed as stop:
            namespace: argparse.Namespace = stop.args[0]
            if hasattr(module, "Values"):
                _, namespace.overrides = script_values(module.Values, namespace.overrides)
            return namespace
    raise AssertionError(f"{path} parses nothing with argparse")


@contextmanager
def stop_at_parser() -> Iterator[None]:
    """While the body runs, the outermost parser raises `_Parsed` after it took its arguments."""
    depth = [0]

    def stopping(name: str) -> Callable[..., Any]:
        real = getattr(argparse.ArgumentParser, name)

        def parse_and_stop(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
            depth[0] += 1
            try:
                result = real(self, *args, **kwargs)
            finally:
                depth[0] -= 1
            if depth[0] == 0:
                namespace, rest = result if isinstance(result, tuple) else (result, [])
                namespace.overrides = [*rest, *(getattr(namespace, "overrides", None) or [])]
                raise _Parsed(namespace)
            return result

        return parse_and_stop

    names = ("parse_args", "parse_known_args", "parse_intermixed_args", "parse_known_intermixed_args")
    patches = [patch.object(argparse.ArgumentParser, name, stopping(name)) for name in names]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def parse(call: Callable[[], argparse.Namespace]) -> tuple[Any, list[str]]:
    """What a parser returns, or its message if it exits with an error."""
    output = StringIO()
    try:
        with redirect_stderr(output), redirect_stdout(output):
            return call(), []
    except SystemExit as stop:
        return None, [output.getvalue().strip()] if stop.code else []
