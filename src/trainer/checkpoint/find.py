"""Choose the checkpoint a run goes on from: one choice for all ranks, verified before reading (CKPT-5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from src.config import Config
from src.errors import Problem, UserError
from src.trainer.checkpoint.agree import agree, everyone
from src.trainer.checkpoint.contents import Backend, collect
from src.trainer.checkpoint.directory import (
    Found,
    IncompleteError,
    read_meta,
    size_in_bytes,
    steps,
    verify_files,
)
from src.trainer.checkpoint.shards import METADATA, Shards, files_read
from src.trainer.runtime import Runtime


def find(config: Config, run_dir: Path, runtime: Runtime, backend: Backend) -> Found | None:
    """The checkpoint that `resume` asks for, the same on every rank and verified by all; a collective.

    Rank 0 lists the candidates, newest first; each rank hashes the files it would read of a candidate, if the
    checkpoint is not above `checkpoint.verify`. The first that all ranks find whole is taken; what was passed
    over is named in `Found.skipped`. Nothing is deleted.

    Returns:
        None if the run has no checkpoint.

    Raises:
        UserError: code 8, `resume=none` and there is one, none of those there is usable, or the one named by
            `resume` is not.
    """
    limit, tensors = size_in_bytes(config.checkpoint.verify), collect(backend, {})
    candidates = agree(runtime, lambda: _candidates(config.resume, run_dir))
    skipped: list[str] = []
    for path in candidates:
        found = verified(path, tensors, limit, runtime)
        if isinstance(found, Found):
            return Found(found.path, found.meta, found.digest, tuple(skipped))
        skipped += [f"{path.name} is not complete: {problem}" for problem in found]
    if candidates:
        raise UserError([_unusable(config.resume, run_dir, skipped)], code=8)
    return None


def _candidates(resume: str, run_dir: Path) -> list[Path]:
    if "/" in resume:
        return [Path(resume)]
    there = steps(run_dir)
    if resume == "none" and there:
        message = f"none, but {run_dir} has checkpoints, the newest is {there[0].name}"
        fix = "resume=auto goes on from it, another run_name= starts anew"
        raise UserError([Problem("resume", message, fix, "CKPT-5")], code=8)
    return there


def _unusable(resume: str, run_dir: Path, skipped: Sequence[str]) -> Problem:
    where = resume if "/" in resume else str(run_dir / "checkpoints")
    fix = "take another one with resume=PATH, or start anew under another run_name="
    return Problem("resume", f"no usable checkpoint in {where}: " + "; ".join(skipped), fix, "CKPT-5")


def verified(path: Path, tensors: Mapping[str, Shards], limit: int, runtime: Runtime) -> Found | list[str]:
    """The checkpoint if it is whole for every rank, else what is wrong with it, each once."""
    chosen = agree(runtime, lambda: _read_or_why(path))
    if isinstance(chosen, str):
        return [chosen]
    verdicts = everyone(runtime, lambda: _verify_here(chosen, tensors, limit))
    problems = sorted({problem for verdict in verdicts for problem in verdict})
    return problems or chosen


def _read_or_why(path: Path) -> Found | str:
    try:
        return Found(path, *read_meta(path))
    except IncompleteError as error:
        return str(error)


def _verify_here(chosen: Found, tensors: Mapping[str, Shards], limit: int) -> list[str]:
    """What this rank finds wrong: it must see rank 0's metadata, and in full the files that it reads."""
    seen = _read_or_why(chosen.path)
    if isinstance(seen, str) or seen.digest != chosen.digest:
        return [seen if isinstance(seen, str) else "ranks see different metadata"]
    if chosen.meta.size > limit:
        return []
    # The index is hashed before it is read: it says which files this rank reads.
    return verify_files(chosen.path, chosen.meta, [METADATA]) or verify_files(
        chosen.path, chosen.meta, files_read(chosen.path, tensors)
    )
