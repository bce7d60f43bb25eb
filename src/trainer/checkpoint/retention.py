"""Which checkpoints are kept (CKPT-7)."""

from __future__ import annotations

import shutil
from pathlib import Path

from src.config import Config
from src.trainer.checkpoint.directory import KEEP, is_complete, steps


def retain(config: Config, run_dir: Path, protect: int) -> None:
    """Delete what `checkpoint.keep_last` and `checkpoint.keep_every` let go; rank 0 alone, after a save.

    Only complete steps count and only those are deleted: a damaged one is left for its owner to look at. What
    interrupted saves left under dotted names goes too.

    Args:
        protect: the step just published, which stays whatever else is there.
    """
    every = config.checkpoint.keep_every
    complete = [path for path in steps(run_dir) if is_complete(path)]
    for path in complete[max(1, config.checkpoint.keep_last) :]:
        step = int(path.name.removeprefix("step-"))
        if step != protect and not (every and step % every == 0) and not (path / KEEP).exists():
            _remove(path)
    for path in (run_dir / "checkpoints").glob(".*-step-*"):
        shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Under another name first: a half deleted directory must not be taken for a damaged checkpoint."""
    hidden = path.with_name(f".gone-{path.name}")
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
