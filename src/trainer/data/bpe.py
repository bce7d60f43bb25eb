"""Training a byte-level BPE on a fixed sample of the corpus (TOK-4)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from src.config import TokenizerConfig
from src.seeds import stream_key
from src.trainer.data.documents import Document
from src.trainer.data.keys import BOS, EOS, Record
from src.trainer.data.lease import Lease
from src.trainer.data.tokenizer import LibraryTokenizer

Corpus = Callable[[], Iterator[Document]]
"""Starts a pass over all documents."""


def sample_texts(corpus: Corpus, config: TokenizerConfig) -> list[str]:
    """Documents in the order of a hash keyed by `tokenizer.seed`, up to `tokenizer.sample_bytes` of UTF-8.

    The document that crosses the limit is cut at it. Equal documents are adjacent, so the order in which the
    corpus lists its documents does not matter; nor does the split, which has another seed.
    """
    prefix = stream_key("tokenizer", config.seed).hex()
    sizes = {i: (_drawn(prefix, document), document.size) for i, document in enumerate(corpus())}
    chosen, left = {}, config.sample_bytes
    for rank, i in enumerate(sorted(sizes, key=sizes.__getitem__)):
        if left <= 0:
            break
        chosen[i] = (rank, left)
        left -= sizes[i][1]
    texts = {}
    for i, document in enumerate(corpus()):
        if i in chosen:
            rank, limit = chosen[i]
            texts[rank] = document.text.encode()[:limit].decode(errors="ignore")
    return [texts[rank] for rank in sorted(texts)]


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
    """A byte-level BPE as JSON text; any UTF-8 text survives encoding and decoding (TOK-5).

    The specials have ids 0 and 1, the 256 bytes follow, then the merges. No normaliser changes a text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, BOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def build_bpe(corpus: Corpus, config: TokenizerConfig, directory: Path, lease: Lease) -> Record:
    """Train into `directory`; returns the manifest's fields."""
    texts = sample_texts(corpus, config)
    lease.check()
    text = train_bpe(texts, config.vocab_size)
    (directory / "tokenizer.json").write_text(text, encoding="utf-8")
    trained = LibraryTokenizer(text, EOS, BOS)
    return {"content": trained.content, "vocab_size": trained.vocab_size, "documents": len(texts)}


def _drawn(prefix: str, document: Document) -> bytes:
    return hashlib.sha256(f"{prefix}:{document.digest}".encode()).digest()
