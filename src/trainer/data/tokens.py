"""The token files of one side of the split: written once, then memory-mapped (STORE-6).

`<side>.bin` holds ids, uint16 if the vocabulary has at most 65,536 entries, else uint32; `<side>.idx` holds
the documents' offsets in ids as int64, one more than there are documents.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from src.errors import UserError
from src.trainer.data.tokenizer import Ids

SIDES = ("train", "heldout")

Mask = npt.NDArray[np.bool_]


class Source(Protocol):
    """Documents as ids; what packing and loading read."""

    name: str
    """Where the documents are, for messages."""

    @property
    def lengths(self) -> Ids:
        """Tokens of each document, separators included [documents]."""
        ...

    def read(self, document: int, start: int, length: int) -> Ids:
        """`length` ids of a document from `start` on."""
        ...

    def targets(self, document: int, start: int, length: int) -> Mask | None:
        """Which of these ids are targets where they follow another one [length]; None: all of them."""
        ...


def dtype_for(vocab_size: int) -> str:
    """Name of the type that holds ids below `vocab_size`."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


class TokenWriter:
    """Appends documents to one side; use as a context."""

    def __init__(self, directory: Path, side: str, vocab_size: int) -> None:
        self._bin = (directory / f"{side}.bin").open("wb")
        self._idx = directory / f"{side}.idx"
        self._dtype = np.dtype(dtype_for(vocab_size)).newbyteorder("<")
        self._vocab_size = vocab_size
        self._offsets = array("q", [0])
        self.max_id = -1

    @property
    def documents(self) -> int:
        """Documents written so far."""
        return len(self._offsets) - 1

    @property
    def tokens(self) -> int:
        """Ids written so far."""
        return self._offsets[-1]

    def add(self, ids: Ids) -> None:
        """Append one document of at least one id; raises UserError (4) for an id outside the vocabulary."""
        assert len(ids) > 0
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self._vocab_size:
            raise UserError(f"token id {high if low >= 0 else low} is not below {self._vocab_size}", code=4)
        self.max_id = max(self.max_id, high)
        self._bin.write(ids.astype(self._dtype).tobytes())
        self._offsets.append(self.tokens + len(ids))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._bin.close()
        if kind is None:
            self._idx.write_bytes(np.frombuffer(self._offsets, np.int64).astype("<i8").tobytes())


class TokenFile:
    """One side of a complete artifact, read through the page cache.

    Raises UserError (4) naming file and place: offsets that do not begin at 0 and increase, and ids that are
    not as many or not as wide as offsets and vocabulary say.
    """

    def __init__(self, directory: Path, side: str, vocab_size: int) -> None:
        self.name = str(directory / f"{side}.bin")
        self.offsets = _read_offsets(directory / f"{side}.idx")
        dtype = np.dtype(dtype_for(vocab_size)).newbyteorder("<")
        size = Path(self.name).stat().st_size
        if int(self.offsets[-1]) * dtype.itemsize != size:
            raise UserError(
                f"{self.name} has {size} bytes, its index says {self.offsets[-1]} ids of {dtype}", code=4
            )
        self._ids = np.memmap(self.name, dtype, "r") if size else np.zeros(0, dtype)

    @property
    def lengths(self) -> Ids:
        """Tokens of each document, separators included [documents]."""
        return np.diff(self.offsets)

    def read(self, document: int, start: int, length: int) -> Ids:
        """`length` ids of a document from `start` on, int64."""
        first = int(self.offsets[document]) + start
        return self._ids[first : first + length].astype(np.int64)

    def targets(self, document: int, start: int, length: int) -> None:
        """Every id of text is a target."""
        return None

    def neighbours(self, limit: int) -> tuple[Ids, Ids]:
        """Each id with its successor in its document, over at most the first `limit` ids [pairs] each."""
        ids = self._ids[:limit].astype(np.int64)
        follows = np.ones(len(ids), bool)
        follows[self.offsets[self.offsets < len(ids)]] = False
        return ids[:-1][follows[1:]], ids[1:][follows[1:]]


def _read_offsets(path: Path) -> Ids:
    content = path.read_bytes()
    if len(content) % 8 or not content:
        raise UserError(f"{path} has {len(content)} bytes: no list of 64-bit offsets", code=4)
    offsets = np.frombuffer(content, "<i8")
    wrong = np.concatenate([offsets[:1] != 0, np.diff(offsets) <= 0])
    if wrong.any():
        at = int(wrong.argmax())
        raise UserError(f"{path}: offset {at} is {offsets[at]}; they begin at 0 and increase", code=4)
    return offsets
