"""Text to ids and back, the same three methods for every kind of tokenizer (TOK-1 to TOK-5)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from src.config import TokenizerConfig
from src.errors import UserError
from src.trainer.data import hf_files
from src.trainer.data.keys import BOS, EOS

Ids = npt.NDArray[np.int64]
"""Token ids [n]."""


class ByteTokenizer:
    """One token a UTF-8 byte, then the two specials; members as of LibraryTokenizer."""

    vocab_size = 256 + len((EOS, BOS))
    content = hashlib.sha256(f"bytes {EOS} {BOS}".encode()).hexdigest()
    eos, bos = 256, 257

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the bytes, with replacement characters where they are not UTF-8."""
        spelling = {self.eos: EOS.encode(), self.bos: BOS.encode()}
        return b"".join(spelling[i] if i > 255 else bytes((i,)) for i in ids).decode(errors="replace")


class LibraryTokenizer:
    """A tokenizer of the `tokenizers` library, from JSON text without truncation and padding."""

    vocab_size: int
    """Largest id plus one, specials included (the true size, without padding rows)."""
    content: str
    """sha256 of everything that decides ids."""
    eos: int
    """Id that ends a document."""
    bos: int | None
    """Id that begins a document; None if the tokenizer has none."""

    def __init__(self, text: str, eos: str, bos: str | None) -> None:
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_str(text)
        self._tokenizer.encode_special_tokens = True
        self.content = hashlib.sha256(text.encode()).hexdigest()
        self.eos = self._id_of(eos)
        self.bos = None if bos is None else self._id_of(bos)
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def _id_of(self, special: str) -> int:
        found = self._tokenizer.token_to_id(special)
        if found is None:
            raise UserError(f"the tokenizer has no entry {special}")
        return found

    def encode(self, text: str) -> list[int]:
        """Ids of a text: no separators, and a special token's spelling stays text (TOK-2)."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text; runs on the library's own threads."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, specials spelled out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


Tokenizer = ByteTokenizer | LibraryTokenizer
"""What encodes documents and continues prompts."""


def load_tokenizer(config: TokenizerConfig, directory: Path | None) -> Tokenizer:
    """The tokenizer that `config` names; a trained one lies in `directory` of the store."""
    if config.kind == "bytes":
        return ByteTokenizer()
    if config.kind == "hf":
        found = hf_files.read(config)
        assert found.specials["eos"] is not None, "keys.check refuses a tokenizer without EOS"
        return LibraryTokenizer(found.tokenizer_json, found.specials["eos"], found.specials["bos"])
    assert directory is not None
    return LibraryTokenizer((directory / "tokenizer.json").read_text(encoding="utf-8"), EOS, BOS)
