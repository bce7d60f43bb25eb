"""The build of a token artifact: encode every document, split, count (TOK-2, SPLIT, PREP-8 to PREP-10)."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, astuple
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from src.config import Config, TokenizerConfig
from src.errors import UserError
from src.trainer.data.baselines import COUNTED_TOKENS, measure
from src.trainer.data.documents import Document, Tally, is_held_out
from src.trainer.data.keys import Record
from src.trainer.data.lease import Lease
from src.trainer.data.tokenizer import Ids, Tokenizer, load_tokenizer
from src.trainer.data.tokens import SIDES, TokenFile, TokenWriter, dtype_for

BATCH_BYTES = 2**20
"""Text of one tokenise call: enough for all threads, little enough to hold."""

BATCHES_AHEAD = 2
"""Batches that wait for each worker."""


def build_tokens(
    config: Config,
    documents: Iterable[Document],
    tally: Tally,
    tokenizer_directory: Path | None,
    directory: Path,
    lease: Lease,
) -> Record:
    """Write both sides into `directory`; returns the manifest's fields.

    Raises UserError (4): an id outside the vocabulary, a side without documents, a worker that died.
    """
    tokenizer = load_tokenizer(config.tokenizer, tokenizer_directory)
    text_bytes = dict.fromkeys(SIDES, 0)
    with ExitStack() as stack:
        writers = {s: stack.enter_context(TokenWriter(directory, s, tokenizer.vocab_size)) for s in SIDES}
        for batch, encoded in _encoded(config, documents, tokenizer, tokenizer_directory):
            lease.check()
            for document, ids in zip(batch, encoded, strict=True):
                held_out = is_held_out(document.digest, config.data.split_seed, config.data.holdout)
                side = "heldout" if held_out else "train"
                writers[side].add(_separated(ids, tokenizer, config.tokenizer.bos))
                text_bytes[side] += document.size
    counts = {side: writer.documents for side, writer in writers.items()}
    _check_sides(config, counts)
    fields: Record = {
        "documents": counts,
        "tokens": {side: writer.tokens for side, writer in writers.items()},
        "text_bytes": text_bytes,
        "max_id": max(writer.max_id for writer in writers.values()),
        "dtype": dtype_for(tokenizer.vocab_size),
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.content,
        "left_out": asdict(tally),
    }
    return {**fields, "baselines": _baselines(directory, fields)}


def _separated(ids: Ids, tokenizer: Tokenizer, bos: bool) -> Ids:
    """One EOS after a document, one BOS before it if asked for."""
    before = [tokenizer.bos] if bos else []
    return np.concatenate([np.array(before, np.int64), ids, np.array([tokenizer.eos], np.int64)])


def _check_sides(config: Config, documents: dict[str, int]) -> None:
    """SPLIT-3: no side that is asked for is empty."""
    train, heldout = documents["train"], documents["heldout"]
    if not train + heldout:
        raise UserError(f"the corpus data={config.data.kind} holds no document with text", code=4)
    if not train or (config.data.holdout > 0 and not heldout):
        raise UserError(
            f"data.holdout={config.data.holdout} with data.split_seed={config.data.split_seed} gives {train}"
            f" training and {heldout} held-out documents; choose another share",
            code=4,
        )


def _baselines(directory: Path, fields: Record) -> Record:
    train, heldout = (TokenFile(directory, side, fields["vocab_size"]) for side in SIDES)
    targets = fields["tokens"]["heldout"] - fields["documents"]["heldout"]
    bytes_per_token = fields["text_bytes"]["heldout"] / targets if targets else None
    pairs = train.neighbours(COUNTED_TOKENS), heldout.neighbours(COUNTED_TOKENS)
    return asdict(measure(*pairs, fields["vocab_size"], bytes_per_token))


Encoded = tuple[list[Document], list[Ids]]

Submit = Callable[[list[str]], "Future[list[Ids]]"]
"""Sends texts to a worker."""


def _encoded(
    config: Config, documents: Iterable[Document], tokenizer: Tokenizer, tokenizer_directory: Path | None
) -> Iterator[Encoded]:
    """Batches of documents with their ids, in order; bytes do not depend on who encodes (PREP-8)."""
    workers = config.data.prepare.workers
    if workers == 0:
        for batch in _batches(documents):
            yield batch, tokenizer.encode_batch([document.text for document in batch])
        return
    encode = partial(_encode_in_worker, astuple(config.tokenizer), tokenizer_directory)
    context = get_context("spawn")  # forked children deadlock in the tokenizer's thread pool
    with ProcessPoolExecutor(workers, context, _start_worker) as pool:
        submit = partial(pool.submit, encode)
        try:
            yield from _in_order(_batches(documents), submit, workers * BATCHES_AHEAD)
        except BrokenProcessPool as error:
            raise UserError("a worker that encodes was killed, perhaps for want of memory", code=4) from error


def _in_order(batches: Iterator[list[Document]], submit: Submit, ahead: int) -> Iterator[Encoded]:
    """Results in the order of the batches, with at most `ahead` of them in memory."""
    waiting: deque[tuple[list[Document], Future[list[Ids]]]] = deque()
    for batch in batches:
        waiting.append((batch, submit([document.text for document in batch])))
        if len(waiting) > ahead:
            first, future = waiting.popleft()
            yield first, future.result()
    for rest, future in waiting:
        yield rest, future.result()


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.size
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # here only: the user's own setting stays as it is


@lru_cache(maxsize=1)
def _worker_tokenizer(fields: tuple[Any, ...], directory: Path | None) -> Tokenizer:
    return load_tokenizer(TokenizerConfig(*fields), directory)


def _encode_in_worker(fields: tuple[Any, ...], directory: Path | None, texts: list[str]) -> list[Ids]:
    """In a worker, which loads the tokenizer at its first batch."""
    return _worker_tokenizer(fields, directory).encode_batch(texts)
