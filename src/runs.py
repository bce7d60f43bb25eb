"""The life of a run directory: which one a command means, who holds it, what a new attempt keeps (RUN).

A command is taken to a directory by its config alone. Code and data are part of what a directory holds: with
other code the same command starts `<name>.2` and leaves the old one as it is.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from src.code_identity import CodeRecord, code_differences
from src.compose import load_config
from src.config import Config
from src.digest import NOT_IDENTITY, flatten, identity
from src.errors import UserError
from src.naming import run_name
from src.records import Record, read_json, read_steps, write_json
from src.resume import Difference, differences
from src.trainer.data import lease

SCHEMA = 1
MOVED = ["overrides.yaml", "plan.json", "env.json", "kernels.json", "code.json", "code.diff", "status.json", "launcher.log", "control", "config.yaml"]
"""What a new attempt moves to `attempts/<n>/` (RUN-3), `config.yaml` last, for it counts the attempts.

The ranks' logs and all `.jsonl` files stay and are appended to (RANK-4, LOG-3)."""


@dataclass
class Status:
    """`status.json` (RUN-6): one writer at a time, replaced atomically."""

    state: str
    """`queued`, `running`, `done`, `stopped` or `failed`."""
    attempt: int
    config_digest: str
    exit_code: int | None = None
    signal: int | None = None
    """The signal that ended the first failing rank or the run."""
    first_failing_rank: int | None = None
    reason: dict[str, str] | None = None
    """`type` and `message` of the first failure."""
    last_step: int | None = None
    host: str = field(default_factory=socket.gethostname)
    started: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    ended: float | None = None

    def write(self, run: Path) -> None:
        """Replace `RUN/status.json`."""
        write_json(run / "status.json", {"schema": SCHEMA, **vars(self)})


def read_status(run: Path) -> Record | None:
    """The object in `RUN/status.json`; None means unknown, never done."""
    return read_json(run / "status.json")


def last_step(run: Path) -> int | None:
    """The last step in `RUN/metrics.jsonl`; None without one."""
    steps = read_steps(run / "metrics.jsonl")
    return int(steps[-1]["step"]) if steps else None


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
    notes: list[str] = []
    for path in candidates(config):
        reasons = other_origin(path, config, code, data_key)
        if reasons and config.run_name is not None:
            raise UserError(refusal(path, reasons, config), code=8)
        if reasons:
            notes.append(f"{path} has {'; '.join(reasons)}: it is left as it is")
            continue
        notes += resume_notes(path, config, code)
        if is_finished(path, config):
            return Claim(path, attempts(path), True, [*notes, finished_note(path)])
        return take(path, config, notes)
    raise AssertionError("candidates never end")


def candidates(config: Config) -> Iterator[Path]:
    """The explicit directory alone, or the default name, then `<name>.2`, `<name>.3` and so on (RUN-8)."""
    first = Path(config.paths.runs) / run_name(config)
    yield first
    if config.run_name is None:
        for number in itertools.count(2):
            yield first.with_name(f"{first.name}.{number}")


def take(path: Path, config: Config, notes: list[str]) -> Claim:
    """Lock `path`; whoever finished it in the meantime is respected."""
    path.mkdir(parents=True, exist_ok=True)
    lock = hold(path)
    if is_finished(path, config):
        lock.release()
        return Claim(path, attempts(path), True, [*notes, finished_note(path)])
    return Claim(path, attempts(path) + 1, notes=notes, lock=lock)


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


def kept_file(run: Path, name: str) -> Path | None:
    """`RUN/<name>`, else the newest one under `attempts/`: an attempt killed between moving and writing left that."""
    found = [run / name, *sorted((run / "attempts").glob(f"*/{name}"), reverse=True)]
    return next((path for path in found if path.is_file()), None)


def attempts(run: Path) -> int:
    """Number of attempts that wrote their config here."""
    return len(list((run / "attempts").glob("*/config.yaml"))) + (run / "config.yaml").is_file()


def other_origin(run: Path, config: Config, code: CodeRecord, data_key: str | None) -> list[str]:
    """Why the directory is of other code or data than this command's (RUN-8); empty if it is not, or is new."""
    if kept_file(run, "config.yaml") is None:
        return []
    path = kept_file(run, "code.json")
    old = (read_json(path) if path else None) or {}
    reasons = []
    if old.get("code_identity") != code.code_identity and config.resume != "allow_code":
        names = code_differences(old, code.json())
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        reasons.append(f"other code ({shown or 'unknown'})")
    if old.get("data_key") != data_key and not config.data.allow_change:
        reasons.append(f"other data (key {short(old.get('data_key'))}, now {short(data_key)})")
    if not reasons and config.run_name is None:
        reasons += other_config(run, config)
    return reasons


def other_config(run: Path, config: Config) -> list[str]:
    """A derived name may meet another config (a sweep's says only what is swept): that one is left as it is."""
    path = kept_file(run, "config.yaml")
    assert path is not None
    old = load_config(path)
    if identity(old) == identity(config):
        return []
    before, now = flatten(old), flatten(config)
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    changed = [key for key in changed if key.split(".")[0] not in NOT_IDENTITY]
    return [f"another config ({', '.join(changed[:4])})"]


def short(key: str | None) -> str:
    """The first characters of a digest."""
    return key[:12] if key else "none"


def refusal(run: Path, reasons: list[str], config: Config) -> str:
    """Why an explicitly named directory cannot be gone on with, and what to type."""
    return (
        f"{run} has {'; '.join(reasons)}; type run_name={config.run_name}-2 to start another run, "
        "or resume=allow_code to go on with the edited code (data.allow_change=true with other data)"
    )


def resume_notes(run: Path, config: Config, code: CodeRecord) -> list[str]:
    """One line for each key that a resume changes; exit 8 with a diff if one of them may not change (RUN-9)."""
    path = kept_file(run, "config.yaml")
    if path is None:
        return []
    allowed, refused = differences(flatten(load_config(path)), flatten(config))
    if refused:
        raise UserError(diff_text(run, refused), code=8)
    if config.resume == "none" and not is_finished(run, config):
        text = f"{run} is unfinished and resume=none refuses to go on with it; type run_name=NAME for another run"
        raise UserError(text, code=8)
    notes = [f"goes on with {difference}" for difference in allowed if telling(difference)]
    old = read_json(kept_file(run, "code.json") or Path()) or {}
    if old.get("code_identity") != code.code_identity:
        notes.append(f"goes on with edited code: {', '.join(code_differences(old, code.json())) or 'unknown'}")
    return notes


def telling(difference: Difference) -> bool:
    """Whether a changed key is worth a line: names and paths of the directory itself are not."""
    return not difference.key.startswith(("paths.", "sweep.", "run_name", "resume"))


def diff_text(run: Path, refused: list[Difference]) -> str:
    """The refusal of a resume, key by key."""
    lines = "\n".join(f"  {difference}" for difference in refused)
    return (
        f"{run} holds a run with other values of keys that a resume may not change [RUN-9]:\n{lines}\n"
        "  set them back, or start another run with another run_name="
    )


def is_finished(run: Path, config: Config) -> bool:
    """Whether the run is done, up to the steps asked for (RUN-2)."""
    status = read_status(run) or {}
    step = status.get("last_step")
    return status.get("state") == "done" and (step is None or int(step) >= config.max_steps)


def finished_note(run: Path) -> str:
    """What a finished run says (RUN-2)."""
    return f"{run} is finished; nothing to do. run_name={run.name}-again starts another"


def begin_attempt(taken: Claim, files: dict[str, str]) -> None:
    """Move the last attempt's papers to `attempts/<n>/`, empty `control/` and write this attempt's `files`.

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
    for stale in (run / "control").iterdir():
        stale.unlink()
    for name in sorted(files, key=lambda name: name == "config.yaml"):
        (run / name).write_text(files[name], encoding="utf-8")
