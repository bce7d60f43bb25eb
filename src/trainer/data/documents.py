"""The documents of a corpus, one at a time and in a fixed order (CORPUS-1, PREP-10)."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tokenize
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from src.config import DataConfig
from src.errors import UserError
from src.trainer.data.files import SourceFile, corpus_file

LINE_SUFFIXES = (".jsonl", ".jsonl.gz", ".txt")
"""Files that `data.unit=line` can cut."""


@dataclass(frozen=True)
class Document:
    """One text."""

    text: str
    size: int
    """Bytes in UTF-8."""
    digest: str
    """sha256 of the UTF-8 bytes as hex: what split and tokenizer sample go by."""


@dataclass
class Tally:
    """What was met on the way through a corpus."""

    empty: int = 0
    """Documents without a character, left out."""
    skipped: int = 0
    """Documents that do not decode, left out."""
    replaced: int = 0
    """Documents that do not decode, read with replacement characters."""


class BadTextError(Exception):
    """A document does not decode; `readable` is what replacement characters make of it."""

    def __init__(self, reason: str, readable: str) -> None:
        self.readable = readable
        super().__init__(reason)


Reading = Callable[[], str]
"""Decodes one document when called; raises BadTextError."""


def documents(data: DataConfig, files: tuple[SourceFile, ...], tally: Tally) -> Iterator[Document]:
    """Every document of `files` that holds text, counting the others in `tally`.

    Raises UserError (4) for a file that cannot be read or is no longer what its identity was taken from, text
    that does not decode under `on_bad_text=error`, and a line without `text_key`.
    """
    for file in files:
        for where, reading in _readings(data, file):
            text = _read(data, where, reading, tally)
            if text:
                encoded = text.encode()
                yield Document(text, len(encoded), hashlib.sha256(encoded).hexdigest())
            elif text is not None:
                tally.empty += 1
        if corpus_file(file.name, file.path).stat != file.stat:
            raise UserError(f"{file.path} changed while it was read; start again when it is at rest", code=4)


def is_held_out(digest: str, split_seed: int, holdout: float) -> bool:
    """The side of the document with this digest: a function of its text alone (SPLIT-1)."""
    drawn = hashlib.sha256(f"{split_seed}:{digest}".encode()).digest()
    return int.from_bytes(drawn[:8], "big") < holdout * 2**64


def _read(data: DataConfig, where: str, reading: Reading, tally: Tally) -> str | None:
    """The text, or None if it is left out."""
    try:
        return reading()
    except BadTextError as bad:
        if data.on_bad_text == "error":
            fix = "data.on_bad_text=skip leaves it out, =replace reads it with replacement characters"
            raise UserError(f"{where}: {bad}; {fix}", code=4) from bad
        if data.on_bad_text == "skip":
            tally.skipped += 1
            return None
        tally.replaced += 1
        return bad.readable


def _readings(data: DataConfig, file: SourceFile) -> Iterator[tuple[str, Reading]]:
    """Where each document of a file stands, and what decodes it."""
    try:
        yield from _raw_readings(data, file)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file.path}: {error}", code=4) from error


def _raw_readings(data: DataConfig, file: SourceFile) -> Iterator[tuple[str, Reading]]:
    if data.unit == "line" and data.kind == "text_files":
        yield from _lines(data, file)
        return
    content = Path(file.path).read_bytes()
    decode = _decode_python if data.kind == "stdlib" else _decode_utf8
    yield file.path, partial(decode, content)


def _lines(data: DataConfig, file: SourceFile) -> Iterator[tuple[str, Reading]]:
    if not file.path.endswith(LINE_SUFFIXES):
        raise UserError(f"{file.path}: data.unit=line reads {', '.join(LINE_SUFFIXES)} only", code=4)
    opener = gzip.open if file.path.endswith(".gz") else open
    with opener(file.path, "rb") as handle:
        for number, line in enumerate(handle, start=1):
            where = f"{file.path}, line {number}"
            content = line.rstrip(b"\r\n")
            if file.path.endswith(".txt"):
                yield where, partial(_decode_utf8, content)
            elif content.strip():
                yield where, partial(_json_text, content, data.text_key, where)


def _json_text(content: bytes, text_key: str, where: str) -> str:
    try:
        found = json.loads(_decode_utf8(content))
    except ValueError as error:
        raise UserError(f"{where}: not JSON: {error}", code=4) from error
    text = found.get(text_key) if isinstance(found, dict) else None
    if not isinstance(text, str):
        keys = ", ".join(sorted(found)) if isinstance(found, dict) else type(found).__name__
        raise UserError(f"{where}: no text under data.text_key={text_key}; found {keys}", code=4)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        readable = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        raise BadTextError("a surrogate without its partner", readable) from error
    return text


def _decode_utf8(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BadTextError(f"not UTF-8 at byte {error.start}", content.decode(errors="replace")) from error


def _decode_python(content: bytes) -> str:
    """Source text by its declared encoding (PEP 263), line ends as they are."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise BadTextError(str(error), content.decode(errors="replace")) from error
