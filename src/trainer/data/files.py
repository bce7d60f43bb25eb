"""Which files a corpus consists of, and their hashes without reading them twice (CORPUS-4)."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from src.errors import UserError

NOT_CORPUS = {"site-packages", "dist-packages", "test", "tests"}
"""Directories of the standard library that hold other people's code or broken files on purpose."""

SETTLED_SECONDS = 2.0
"""A file changed more recently is not remembered: a second write within one clock tick would go unseen."""


@dataclass(frozen=True)
class SourceFile:
    """A file of a corpus and what `stat` says of it."""

    name: str
    """Path relative to the corpus, with `/`: part of the corpus's identity."""
    path: str
    stat: tuple[int, int, int, int]
    """Device, inode, size in bytes, time of change in ns."""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stat[2]


def corpus_file(name: str, path: str) -> SourceFile:
    """The file at `path`; raises UserError (4) if it cannot be looked at."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", code=4) from error
    return SourceFile(name, path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))


def stdlib_files() -> list[SourceFile]:
    """Every `.py` file of this interpreter's standard library, in path order, without NOT_CORPUS."""
    root = sysconfig.get_path("stdlib")
    found: list[str] = []
    for directory, below, names in os.walk(root):
        below[:] = [name for name in below if name not in NOT_CORPUS]
        found += [os.path.join(directory, name) for name in names if name.endswith(".py")]
    files = [(os.path.relpath(path, root).replace(os.sep, "/"), path) for path in found]
    return [corpus_file(name, path) for name, path in sorted(files)]


def matching_files(patterns: Iterable[str]) -> list[SourceFile]:
    """Files that match any of the globs (`**` crosses directories), each once, sorted by name.

    Names are relative to the deepest directory that holds all of them, so a corpus may move. Raises
    UserError (4) naming each pattern without a match.
    """
    paths: set[str] = set()
    unmatched = []
    for pattern in patterns:
        matches = [match for match in glob.glob(pattern, recursive=True) if os.path.isfile(match)]
        paths.update(map(os.path.abspath, matches))
        unmatched += [] if matches else [pattern]
    if unmatched:
        raise UserError(f"data.files: no file matches {', '.join(unmatched)}", code=4)
    root = os.path.commonpath({os.path.dirname(path) for path in paths})
    start = len(os.path.join(root, ""))
    return [corpus_file(path[start:].replace(os.sep, "/"), path) for path in sorted(paths)]


class HashCache:
    """sha256 of files by (device, inode, size, mtime_ns), kept as lines of one text file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known = _read_lines(path)
        self._new: dict[str, str] = {}

    def digest(self, file: SourceFile) -> str:
        """sha256 of the file's bytes as hex; a known file is not opened. UserError (4) if unreadable."""
        key = " ".join(map(str, file.stat))
        known = self._known.get(key)
        if known is not None:
            return known
        digest = hash_file(Path(file.path))
        if time.time() - file.stat[3] * 1e-9 > SETTLED_SECONDS:
            self._new[key] = self._known[key] = digest
        return digest

    def save(self) -> None:
        """Write what is new, the file replaced whole.

        Losing a race, or a store that is read-only or full, only costs hashing again.
        """
        if not self._new:
            return
        merged = {**_read_lines(self.path), **self._new}
        temporary = self.path.with_name(f".tmp-{self.path.name}-{uuid.uuid4().hex}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text("".join(f"{key} {digest}\n" for key, digest in merged.items()))
            temporary.replace(self.path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()


def hash_file(path: Path) -> str:
    """sha256 of a file as hex; raises UserError (4) if it cannot be read."""
    try:
        with path.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", code=4) from error


def _read_lines(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.rpartition(" ") for line in lines)
    return {key: digest for key, _, digest in pairs if len(digest) == 64}
