"""The life of a run directory: which one a command means, who holds it, what a new attempt keeps (RUN).

A command is taken to a directory by its config alone. Code and data are part of what a directory holds: with
other code the same command starts `<name>.2` and leaves the old one as it is.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from src.code_identity import CodeRecord
from src.config import Config
from src.errors import Problem, UserError
from src.naming import run_name
from src.resume import other_origin, refusal, resume_notes
from src.status import is_finished
from src.trainer.checkpoint import directory
from src.trainer.data import lease

MOVED = [
    "overrides.yaml",
    "plan.json",
    "env.json",
    "kernels.json",
    "code.json",
    "code.diff",
    "job.json",
    "status.json",
    "launcher.log",
    "control",
    "config.yaml",
]
"""What a new attempt moves to `attempts/<n>/` (RUN-3), `config.yaml` last, for it counts the attempts.

The ranks' logs and all `.jsonl` files stay and are appended to (RANK-4, LOG-3)."""


@dataclass
class Claim:
    """The directory that a command means, and what to say about it."""

    path: Path
    attempt: int
    """1 in a new directory."""
    finished: bool = False
    """Whether the run is done; then nothing is held and nothing may be written."""
    notes: list[str] = field(default_factory=list)
    """Lines for the user: other code, changed keys, what starts another run."""
    lock: lease.Lease | None = None

    def release(self) -> None:
        """Let other launching processes have the directory."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None


def claim(config: Config, code: CodeRecord, data_key: str | None) -> Claim:
    """Find the directory of this config, code and data, and hold it unless the run is finished.

    Raises:
        UserError: the directory or the resume is refused (8), another process holds it (5).
    """
    found = find(config, code, data_key)
    return found if found.finished else take(found, config)


def find(config: Config, code: CodeRecord, data_key: str | None) -> Claim:
    """The directory that `claim` would hold; nothing is written or held. Raises UserError (8)."""
    notes: list[str] = []
    for path in candidates(config):
        reasons = other_origin(path, config, code, data_key)
        if reasons and config.run_name is not None:
            raise UserError(refusal(path, reasons, config), code=8)
        if reasons:
            notes.append(f"{path} has {'; '.join(reasons)}: it is left as it is")
            continue
        changes = resume_notes(path, config, code)
        if is_finished(path, config):
            unused = [note.replace("goes on with", "not used:") for note in changes]
            return Claim(path, attempts(path), True, [*notes, *unused, finished_note(path)])
        check_sources(path, config)
        return Claim(path, attempts(path) + 1, notes=[*notes, *changes])
    raise AssertionError("candidates never end")


def check_sources(run: Path, config: Config) -> None:
    """Raise `UserError` (8) before anything is written if what `resume` or `init_from` names is not there."""
    if "/" in config.resume:
        check_checkpoint("resume", Path(config.resume), "CKPT-5")
    elif config.init_from is not None and not directory.steps(run):
        source = Path(config.init_from)
        if not source.is_file():
            check_checkpoint("init_from", source, "CKPT-13")


def check_checkpoint(key: str, path: Path, rule: str) -> None:
    """Raise `UserError` (8) unless `path` is a whole checkpoint; for a run's directory, name its newest."""
    try:
        directory.read_meta(path)
    except directory.IncompleteError as error:
        newest = directory.newest(path)
        why = str(error) if path.is_dir() else "there is no such directory"
        fix = f"type {key}={newest}" if newest else f"type {key}=RUN/checkpoints/step-NNNNNNNN"
        problem = Problem(key, f"{path} is no complete checkpoint: {why}", fix, rule)
        raise UserError([problem], code=8) from error


def candidates(config: Config) -> Iterator[Path]:
    """The explicit directory alone, or the default name, then `<name>.2`, `<name>.3` and so on (RUN-8)."""
    first = Path(config.paths.runs) / run_name(config)
    yield first
    if config.run_name is None:
        for number in itertools.count(2):
            yield first.with_name(f"{first.name}.{number}")


def take(found: Claim, config: Config) -> Claim:
    """Lock the directory; whoever finished the run in the meantime is respected."""
    path = found.path
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = hold(path)
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror}; paths.runs=DIRECTORY names another place"
        raise UserError(message, code=8) from error
    if is_finished(path, config):
        lock.release()
        return Claim(path, attempts(path), True, [*found.notes, finished_note(path)])
    return Claim(path, attempts(path) + 1, notes=found.notes, lock=lock)


def hold(path: Path) -> lease.Lease:
    """Take `run.lock`, or exit 5 naming who has it (RUN-5)."""
    try:
        return lease.claim(path / "run.lock", attempt=str(path))
    except lease.LeaseHeld as held:
        raise UserError(
            f"{path} is being trained by {held.owner or 'another process'}; wait for it, stop it, "
            "or start another run with run_name=NAME",
            code=5,
        ) from None


def attempts(run: Path) -> int:
    """Number of attempts that wrote their config here."""
    return len(list((run / "attempts").glob("*/config.yaml"))) + (run / "config.yaml").is_file()


def finished_note(run: Path) -> str:
    """What a finished run says (RUN-2)."""
    return f"{run} is finished; nothing to do. run_name={run.name}-again starts another"


def begin_attempt(taken: Claim, files: dict[str, str]) -> None:
    """Move the last attempt's papers, `control/` too, to `attempts/<n>/` and write this attempt's `files`.

    `config.yaml` is written last: a directory with one has everything else (RUN-3).
    """
    run = taken.path
    if (run / "config.yaml").is_file():
        kept = run / "attempts" / f"{taken.attempt - 1:04d}"
        kept.mkdir(parents=True, exist_ok=True)
        for name in MOVED:
            if (run / name).exists():
                os.replace(run / name, kept / name)
    for name in ("control", "ranks"):
        (run / name).mkdir(exist_ok=True)
    for name in sorted(files, key=lambda name: name == "config.yaml"):
        (run / name).write_text(files[name], encoding="utf-8")
