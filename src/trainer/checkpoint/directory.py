"""Where checkpoints lie and which of them are complete; no torch here.

A step is a directory ``RUN/checkpoints/step-00000100`` that holds ``meta.json`` and the files it names. It is
written under a dotted name and renamed when whole (CKPT-4), so that a directory without the dot was complete
once; whether it still is, `read_meta` and `verify_files` say.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from src.errors import Problem, UserError

FORMAT = 1
"""Version of `Meta` and of the names of tensors; raised when an older reader would misread a newer file."""
META = "meta.json"
KEEP = "keep"
"""An empty file of this name in a checkpoint protects it from retention."""
_STEP = re.compile(r"step-(\d{8,})")
_SIZE = re.compile(r"(\d+)(B|KiB|MiB|GiB|TiB)?")
_UNITS = {None: 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class IncompleteError(Exception):
    """A checkpoint that cannot be used; the text says which file and why."""


@dataclass(frozen=True)
class FileInfo:
    """Size and sha256 of one data file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class TensorInfo:
    """Global shape and dtype (torch's name, such as ``float32``) of one saved tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Meta:
    """The contents of ``meta.json``: everything about a checkpoint but the numbers."""

    step: int
    attempt: int
    scalars: dict[str, Any]
    """What the loop counts: steps, tokens, samples, updates; and the recent steps that a spike is told by."""
    config: dict[str, Any]
    """The run's config, flattened to dotted keys."""
    identity: str
    """Digest of what makes the run (CFG-15)."""
    data_key: str | None
    moments: list[str]
    """Names of the optimizer's moments, which are saved as ``<parameter>::<moment>``."""
    tensors: dict[str, TensorInfo]
    files: dict[str, FileInfo]
    versions: dict[str, str]
    """Versions of the libraries that wrote it; for a reader's eyes only."""
    format: int = FORMAT

    @property
    def size(self) -> int:
        """Bytes of all data files."""
        return sum(info.bytes for info in self.files.values())

    def text(self) -> str:
        """As JSON, with the format first."""
        return json.dumps({"format": self.format, **asdict(self)}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def parse(cls, text: str, where: Path) -> Meta:
        """Read `text`.

        Raises:
            IncompleteError: it is not the JSON object that `text` writes.
            UserError: code 8, it was written in another format.
        """
        try:
            raw = json.loads(text)
            if raw["format"] != FORMAT:
                raise UserError([_other_format(where, raw["format"])], code=8)
            raw["tensors"] = {n: TensorInfo(tuple(t["shape"]), t["dtype"]) for n, t in raw["tensors"].items()}
            raw["files"] = {n: FileInfo(**f) for n, f in raw["files"].items()}
            return cls(**raw)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise IncompleteError(f"{META} is damaged ({type(error).__name__}: {error})") from error


def _other_format(where: Path, found: Any) -> Problem:
    return Problem(
        key="format",
        message=f"{where} is written in format {found!r}, this version reads {FORMAT}",
        fix="load it with the version of Manyhead that wrote it",
        rule="CKPT-9",
    )


@dataclass(frozen=True)
class Found:
    """A checkpoint that was chosen, on every rank the same."""

    path: Path
    meta: Meta
    digest: str
    """sha256 of its ``meta.json``."""
    skipped: tuple[str, ...] = field(default=())
    """Newer ones that are not complete: each its name and what is wrong, to be shown to the user."""

    @property
    def step(self) -> int:
        """Optimizer steps that it holds."""
        return self.meta.step


def step_path(run_dir: Path, step: int) -> Path:
    """The directory of a step."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def hidden_path(run_dir: Path, kind: str, step: int, attempt: int) -> Path:
    """A directory beside the steps that no reader takes for one; `kind` is ``tmp`` or ``old``."""
    return run_dir / "checkpoints" / f".{kind}-step-{step:08d}-{attempt}"


def steps(run_dir: Path) -> list[Path]:
    """Directories of steps, newest first, complete or not."""
    parent = run_dir / "checkpoints"
    names = os.listdir(parent) if parent.is_dir() else []
    found = [(int(match[1]), name) for name in names if (match := _STEP.fullmatch(name))]
    return [parent / name for _, name in sorted(found, reverse=True)]


def read_meta(path: Path) -> tuple[Meta, str]:
    """The metadata of a checkpoint and the sha256 of its file, after the sizes of all files were compared.

    Raises:
        IncompleteError: ``meta.json`` or a data file is missing, damaged or of another size.
        UserError: code 8, it was written in another format.
    """
    try:
        raw = (path / META).read_bytes()
    except OSError as error:
        raise IncompleteError(f"{META} cannot be read ({error.strerror})") from error
    try:
        meta = Meta.parse(raw.decode(), path)
    except UnicodeDecodeError as error:
        raise IncompleteError(f"{META} is damaged ({error.reason})") from error
    if problems := [p for name, info in meta.files.items() if (p := _wrong_size(path / name, info))]:
        raise IncompleteError("; ".join(problems))
    return meta, hashlib.sha256(raw).hexdigest()


def _wrong_size(path: Path, info: FileInfo) -> str:
    try:
        size = path.stat().st_size
    except OSError:
        return f"{path.name} is missing"
    return "" if size == info.bytes else f"{path.name} has {size} bytes, not {info.bytes}"


def verify_files(path: Path, meta: Meta, names: Iterable[str]) -> list[str]:
    """What is wrong with the named files of a checkpoint, by their sha256."""
    return [f"{name} has another sha256" for name in names if sha256(path / name) != meta.files[name].sha256]


def sha256(path: Path) -> str:
    """Digest of a file's bytes, read in blocks."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def newest(run_dir: Path) -> Path | None:
    """The newest checkpoint whose metadata reads and whose files have their sizes."""
    return next((path for path in steps(run_dir) if is_complete(path)), None)


def is_complete(path: Path) -> bool:
    """Whether the metadata reads and all files have their sizes; a checkpoint of another format counts."""
    try:
        read_meta(path)
    except IncompleteError:
        return False
    except UserError:
        return True
    return True


def size_in_bytes(text: str) -> int:
    """``64GiB`` → 68719476736; units B, KiB, MiB, GiB, TiB, none is bytes.

    Raises:
        UserError: it is not such a size.
    """
    size = parse_size(text)
    if size is None:
        message = f"{text!r} is no size; a number and B, KiB, MiB, GiB or TiB"
        raise UserError([Problem("checkpoint.verify", message, "type checkpoint.verify=64GiB", "CFG-6")])
    return size


def parse_size(text: str) -> int | None:
    """Bytes of a size as `size_in_bytes` takes it; None if it is none."""
    match = _SIZE.fullmatch(text.strip())
    return None if match is None else int(match[1]) * _UNITS[match[2]]
