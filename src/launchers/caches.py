"""Where compilers keep what they made: on a disk that can be written, apart by version (CACHE)."""

from __future__ import annotations

import os
import platform
import tempfile
from pathlib import Path

from src.code_identity import package_version, toolkit
from src.config import Config
from src.errors import UserError


def cache_root(config: Config) -> tuple[Path, str | None]:
    """Directory of the compiler caches, by versions, and a warning where it is not the usual one (CACHE).

    Raises:
        UserError: `paths.cache` is set and not writable (3).
    """
    versions = f"{package_version('torch')}-{package_version('triton')}"
    stamp = f"{platform.machine()}-{versions}-{toolkit()}"
    if config.paths.cache is not None:
        if not is_writable(Path(config.paths.cache)):
            raise UserError(
                f"paths.cache={config.paths.cache} is not writable; type another directory", code=3
            )
        return Path(config.paths.cache) / stamp, None
    local = Path(f"/var/tmp/manyhead-{os.getuid()}")
    if is_writable(local):
        return local / stamp, None
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "manyhead"
    return home / stamp, f"warning: {local} is not writable; compiler caches go to {home}"


def seated(root: Path, seat: int) -> Path:
    """The caches of one of several jobs side by side, which share none; the first has the root itself."""
    return root / f"seat-{seat}" if seat else root


def is_writable(directory: Path) -> bool:
    """Whether a file can be made, renamed and removed there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Under a name of its own: nodes that share the directory may have processes of one number.
        handle, name = tempfile.mkstemp(prefix=".probe-", dir=directory)
        os.close(handle)
        Path(name).rename(f"{name}-moved").unlink()
    except OSError:
        return False
    return True
