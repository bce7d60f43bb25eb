"""Save a checkpoint: written under another name by all ranks, published by one rename (CKPT-4)."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from src.config import Config
from src.digest import flatten, identity
from src.errors import Problem, UserError
from src.models.names import canonical
from src.trainer.checkpoint.agree import agree, everyone
from src.trainer.checkpoint.contents import Backend, collect, is_weight
from src.trainer.checkpoint.directory import META, FileInfo, Meta, TensorInfo, hidden_path, sha256, step_path
from src.trainer.checkpoint.shards import Written, write
from src.trainer.runtime import Runtime

POINTS = ("start", "staged", "item", "written", "hashed", "meta", "whole", "aside", "published", "end")
"""Where `hook` of `save` is called, in this order; ``item`` before each box of a tensor."""


def _ignore(point: str) -> None:
    """The hook of a save that nobody disturbs."""


def save(
    config: Config,
    run_dir: Path,
    attempt: int,
    step: int,
    backend: Backend,
    moments: Mapping[str, Mapping[str, Tensor]],
    scalars: Mapping[str, Any],
    runtime: Runtime,
    data_key: str | None,
    hook: Callable[[str], None] = _ignore,
) -> Path:
    """Publish the state after `step` steps as ``checkpoints/step-…`` of `run_dir`; all ranks call it.

    Args:
        moments: moment name → parameter name → this rank's shard, shaped like the parameter's.
        scalars: what the loop counts; kept in ``meta.json`` as they are on rank 0.
        hook: called at `POINTS`, so that tests can fail or end the process there.

    Returns:
        The directory; when it is returned, the checkpoint is complete and durable.

    Raises:
        UserError: code 1, the system would not let some rank write, for want of space or otherwise; on every
            rank. What was written of this checkpoint is gone, older ones are untouched.
        RuntimeError: some rank could not write for another reason; likewise.
    """
    hook("start")
    staging, target = hidden_path(run_dir, "tmp", step, attempt), step_path(run_dir, step)
    with _nothing_left_of_a_failure(staging, target, runtime):
        agree(runtime, lambda: _empty(staging))
        hook("staged")
        written = write(staging, collect(backend, moments), runtime, hook)
        _check_names(config, written)
        hook("written")
        files = everyone(runtime, lambda: {name: _fingerprint(staging / name) for name in written.files})
        hook("hashed")
        meta = Meta(
            step=step,
            attempt=attempt,
            scalars=dict(scalars),
            config=flatten(config),
            identity=identity(config),
            data_key=data_key,
            moments=sorted(moments),
            tensors={name: TensorInfo(*info) for name, info in written.tensors.items()},
            files={name: info for part in files for name, info in part.items()},
            versions={"torch": torch.__version__, "python": platform.python_version()},
        )
        publication = _Publication(staging, target, hidden_path(run_dir, "old", step, attempt), hook)
        agree(runtime, lambda: publication.run(meta))
    hook("end")
    return target


@contextmanager
def _nothing_left_of_a_failure(staging: Path, target: Path, runtime: Runtime) -> Iterator[None]:
    """Free what a save that failed has written: the usual cause is a full disk, which the next one needs.

    All ranks fail together, so none is still writing.
    """
    try:
        yield
    except Exception as error:
        if runtime.rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError([_unwritten(target, error)], code=1) from error
        raise


def _unwritten(target: Path, error: OSError) -> Problem:
    free = shutil.disk_usage(target.parent).free / 2**30
    message = (
        f"{target} could not be written: {error.strerror or error}. {free:.2f} GiB are free there now; "
        "older checkpoints are as they were"
    )
    fix = "make room, or keep fewer with checkpoint.keep_last=1, and the same command goes on from the newest"
    return Problem("checkpoint", message, fix, "CKPT-4")


def _check_names(config: Config, written: Written) -> None:
    """All ranks together hold the model's weights; one that names its own wrongly would lose them unseen."""
    wanted = {name: entry.shape for name, entry in canonical(config.model).items()}
    found = {name: shape for name, (shape, _) in written.tensors.items() if is_weight(name)}
    if wanted != found:
        odd = sorted({name for name, _ in wanted.items() ^ found.items()})
        raise RuntimeError(f"{len(odd)} tensors are not those of the model, among them {odd[:3]}")


def _empty(staging: Path) -> None:
    """What saves that were killed left behind goes, first of all: the room may be needed."""
    for left in staging.parent.glob(".tmp-step-*"):
        shutil.rmtree(left, ignore_errors=True)
    staging.mkdir(parents=True)


def _fingerprint(path: Path) -> FileInfo:
    return FileInfo(path.stat().st_size, sha256(path))


@dataclass(frozen=True)
class _Publication:
    """The last part of a save, on rank 0 alone: until the rename, nothing is there."""

    staging: Path
    target: Path
    aside: Path
    hook: Callable[[str], None]

    def run(self, meta: Meta) -> None:
        """Write the metadata, make everything durable, rename."""
        self._write_meta(meta)
        fsync(self.staging)
        self.hook("whole")
        if self.target.exists():
            # Damaged, or left behind by a resume from an earlier step; retention removes it.
            shutil.rmtree(self.aside, ignore_errors=True)
            self.target.rename(self.aside)
        self.hook("aside")
        self.staging.rename(self.target)
        self.hook("published")
        fsync(self.target.parent)

    def _write_meta(self, meta: Meta) -> None:
        text = meta.text()
        with (self.staging / META).open("w") as stream:
            stream.write(text[: len(text) // 2])
            stream.flush()
            self.hook("meta")
            stream.write(text[len(text) // 2 :])
            stream.flush()
            os.fsync(stream.fileno())


def fsync(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
