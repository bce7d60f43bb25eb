"""Two checkouts side by side: this one, and another commit or directory, gone again afterwards (BENCH-9)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from src.code_identity import CHECKOUT, git
from src.errors import UserError


@dataclass(frozen=True)
class Tree:
    """A checkout that can train."""

    name: str
    """How the report calls it."""
    root: Path


@contextmanager
def base_tree(base: str, scratch: Path) -> Iterator[Tree]:
    """The tree of a directory as it is, or of a commit as a worktree that is removed on every way out.

    Raises:
        UserError: it is neither, or nothing that trains lies there.
    """
    if Path(base).is_dir():
        yield _checked(Tree(base, Path(base).resolve()))
        return
    commit = git(CHECKOUT, "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}")
    if commit is None:
        raise UserError(f"{base} is neither a directory nor a commit of {CHECKOUT}")
    root = scratch / "base"
    if git(CHECKOUT, "worktree", "add", "--quiet", "--detach", str(root), commit.strip()) is None:
        raise UserError(f"git worktree add {root} {commit.strip()} failed: try it by hand", code=1)
    try:
        yield _checked(Tree(f"{base} ({commit[:7]})", root))
    finally:
        git(CHECKOUT, "worktree", "remove", "--force", str(root))


def head_tree() -> Tree:
    """The working tree that this runs from, edits included."""
    commit = git(CHECKOUT, "rev-parse", "HEAD")
    edited = git(CHECKOUT, "status", "--porcelain", "--untracked-files=no")
    name = f"working tree ({commit[:7]}{', edited' if edited else ''})" if commit else "working tree"
    return Tree(name, CHECKOUT)


def _checked(tree: Tree) -> Tree:
    if not (tree.root / "train.py").is_file():
        raise UserError(f"{tree.root} holds no train.py")
    return tree


@contextmanager
def ending_in_order() -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does, so that what was made for the time being is removed."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def train(tree: Tree, overrides: Sequence[str], run: Path) -> Path:
    """Train in a process of its own with the tree's code; the directory of the finished run.

    Raises:
        UserError: the run failed, with the last lines that it wrote.
    """
    words = [f"paths.runs={run.parent}", f"paths.data={run.parent.parent / 'data'}", f"run_name={run.name}"]
    environment = {**os.environ, "PYTHONPATH": str(tree.root), "PYTHONDONTWRITEBYTECODE": "1"}
    log = run.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "train.py", *overrides, *words],
            cwd=tree.root,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C would ask it to save a checkpoint that nobody wants.
        )
        code = _outcome(process)
    if code != 0:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
        told = f"train.py {' '.join(overrides)} ended with {code}"
        raise UserError(f"{tree.name}: {told}:\n{last}", code=1)
    return run


def _outcome(process: subprocess.Popen[bytes]) -> int:
    """The exit code; whoever interrupts the wait ends the process and those of its group."""
    try:
        return process.wait()
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
