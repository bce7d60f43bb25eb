"""Artifacts by key: complete or absent, built by one process, never rewritten (STORE-1 to 6, STORE-8).

<root>/<section>/<key>/      manifest.json and the files it names        exists means complete
<root>/<section>/<key>.d/    lease, beat                                 who builds
<root>/<section>/<key>.d/attempts/<attempt>.json                         why a build failed
<root>/<section>/.tmp-<key>-<host>-<pid>-<uuid>/                         a build under way
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.errors import UserError
from src.trainer.data import failures
from src.trainer.data.files import hash_file
from src.trainer.data.keys import Record, canonical, key_of
from src.trainer.data.lease import POLL_LIMIT_SECONDS, POLL_SECONDS, Lease, Watch

MANIFEST = "manifest.json"

Build = Callable[[Path, Lease], Record]
"""Writes files into an empty directory, checking the lease between pieces; returns the manifest's fields."""

Report = Callable[[str], None]
"""Takes one line for the person who waits."""


@dataclass(frozen=True)
class Artifact:
    """A complete artifact."""

    path: Path
    manifest: dict[str, Any]


class NotReadyError(Exception):
    """An artifact is absent or broken; the text names the file."""


class Store:
    """The artifacts below one directory."""

    def __init__(self, root: Path, timeout: float, report: Report, attempt: str = "") -> None:
        """`attempt`: what this is for; a build that failed for it is not tried again (LEASE-6)."""
        self.root = root
        self._timeout = timeout
        self._report = report
        self._attempt = attempt

    def directory(self, section: str, key: str) -> Path:
        """Where the artifact is, or would be."""
        return self.root / section / key

    def open(self, section: str, key: str) -> Artifact:
        """The artifact; raises NotReadyError if it is absent or fails STORE-5."""
        path = self.directory(section, key)
        return Artifact(path, read_manifest(path, key))

    def ensure(self, section: str, record: Record, build: Build, space: int) -> tuple[Artifact, bool]:
        """The artifact of `record`, and whether this call built it.

        One process builds, the others wait for it. `space` is the most bytes that the build may need, for the
        message of a full disk. Raises UserError (4) for that, for a store that cannot be written, and for a
        wait beyond the time limit.
        """
        try:
            return self._find_or_build(section, record, build, space)
        except OSError as error:
            raise self._explained(error, space) from error

    def _find_or_build(self, section: str, record: Record, build: Build, space: int) -> tuple[Artifact, bool]:
        key = key_of(record)
        lease_path = self.directory(section, f"{key}.d") / "lease"
        watch, poll, started = Watch(lease_path), POLL_SECONDS, time.monotonic()
        while True:
            if (found := self._find(section, key)) is not None:
                return found, False
            failures.check(lease_path, self._attempt)
            lease = Lease.take(lease_path, self._attempt)
            if lease is not None:
                with lease, failures.recorded(lease_path, self._attempt):
                    failures.check(lease_path, self._attempt)
                    built = self._build(section, record, build, lease)
                if built is not None:
                    return built
            elif (verdict := watch.verdict()) == "dead":
                self._report(f"taking over {section}/{key}: {watch.owner or 'its builder'} is gone")
                watch.steal()
            elif verdict != "free":
                if poll == POLL_SECONDS:
                    self._report(
                        f"waiting for {section}/{key}, which {watch.owner or 'another process'} builds"
                    )
                self._check_wait(watch, started)
                time.sleep(poll)
                poll = min(2 * poll, POLL_LIMIT_SECONDS)

    def _find(self, section: str, key: str) -> Artifact | None:
        try:
            return self.open(section, key)
        except NotReadyError:
            return None

    def _check_wait(self, watch: Watch, started: float) -> None:
        if time.monotonic() - started < self._timeout:
            return
        raise UserError(
            f"waited {self._timeout:.0f} s (data.prepare.timeout) for {watch.path}, held by {watch.owner},"
            f" whose beat changed {watch.silence:.0f} s ago; is {self.root} shared by both hosts?",
            code=4,
        )

    def _build(
        self, section: str, record: Record, build: Build, lease: Lease
    ) -> tuple[Artifact, bool] | None:
        """Build under the lease, unless it was published meanwhile; None if the lease was lost."""
        key = key_of(record)
        final = self.directory(section, key)
        if (found := self._find(section, key)) is not None:
            return found, False
        self._clear(final)
        name = f".tmp-{key}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex}"
        temporary = final.with_name(name)
        try:
            temporary.mkdir(parents=True)
            fields = build(temporary, lease)
            _finish(temporary, {**fields, "section": section, "key": key, "record": record})
            lease.check()
            _publish(temporary, final)
        except Exception:
            if lease.is_held:
                raise
            self._report(f"lost {section}/{key} to another builder")
            return None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return self.open(section, key), True

    def _clear(self, final: Path) -> None:
        """Under the lease: move a broken artifact aside, remove what dead builders of this key left."""
        for left in final.parent.glob(f".tmp-{final.name}-*"):
            shutil.rmtree(left, ignore_errors=True)
        if final.exists():
            try:
                read_manifest(final, final.name)
            except NotReadyError as reason:
                bad = final.with_name(f"{final.name}.bad-{uuid.uuid4().hex}")
                final.rename(bad)
                self._report(f"{reason}; moved to {bad.name}, building it again")

    def _explained(self, error: OSError, space: int) -> UserError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            place = f"{error.filename}: " if error.filename else ""
            return UserError(f"cannot build below paths.data={self.root}: {place}{error.strerror}", code=4)
        there = next(path for path in (self.root, *self.root.parents) if path.exists())
        free = shutil.disk_usage(there).free
        need = f"the build needs up to {space / 2**20:.1f} MiB, {free / 2**20:.1f} MiB are free"
        return UserError(f"no space left below paths.data={self.root}: {need}", code=4)


def read_manifest(directory: Path, key: str) -> dict[str, Any]:
    """The manifest of a ready artifact: it parses, is unchanged, is `key`'s, and every file has its size.

    Raises NotReadyError naming the file; UserError (4) if it is there and may not be read.
    """
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        own = manifest.pop("sha256")
        is_whole = own == _own_hash(manifest)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotReadyError(f"{path} is missing") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", code=4) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotReadyError(f"{path} is broken: {error}") from error
    if not is_whole:
        raise NotReadyError(f"{path} is broken: its own hash differs")
    if manifest["key"] != key:
        raise NotReadyError(f"{path} is of key {manifest['key']}, not {key}")
    for name, said in manifest["files"].items():
        file = directory / name
        size = file.stat().st_size if file.exists() else None
        if size != said["size"]:
            raise NotReadyError(f"{file} has {'no file' if size is None else size}, not {said['size']} bytes")
    return dict(manifest)


def verify(directory: Path, key: str) -> dict[str, Any]:
    """The manifest after reading every file whole; raises NotReadyError naming the file that differs."""
    manifest = read_manifest(directory, key)
    for name, said in manifest["files"].items():
        found = hash_file(directory / name)
        if found != said["sha256"]:
            raise NotReadyError(f"{directory / name} has sha256 {found}, not {said['sha256']}")
    return manifest


def _finish(directory: Path, fields: Record) -> None:
    """Make the files durable, then write the manifest last, then the directory (STORE-4)."""
    files = {}
    for path in sorted(directory.iterdir()):
        _sync(path)
        files[path.name] = {"size": path.stat().st_size, "sha256": hash_file(path)}
    manifest = {**fields, "files": files}
    manifest["sha256"] = _own_hash(manifest)
    path = directory / MANIFEST
    path.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    _sync(path)
    _sync(directory)


def _own_hash(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(canonical(manifest).encode()).hexdigest()


def _publish(temporary: Path, final: Path) -> None:
    """One rename; a directory that is there already is success once verified."""
    try:
        os.rename(temporary, final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        read_manifest(final, final.name)
        return
    _sync(final.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
