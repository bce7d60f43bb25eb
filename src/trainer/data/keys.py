"""Names of data by content: corpus, tokenizer, token artifact (STORE-1, TOK-1, TOK-4).

No torch, tokenizers or datasets here: every start computes a key, and so does a plan that builds nothing.
Computing one writes nothing but the cache of file hashes, and that only if asked to.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.config import Config
from src.errors import Problem
from src.trainer.data import hf_files
from src.trainer.data.files import HashCache, SourceFile, matching_files, stdlib_files

TOKENS_FORMAT = 1
"""Layout and meaning of a token artifact. 1: ids and 64-bit offsets, one EOS a document."""

BPE_FORMAT = 1
"""How a BPE is trained. 1: byte level, documents by hash up to `sample_bytes`."""

PLAN_FORMAT = 1
"""Layout of packing plans and the rules behind them. 1: pieces [P, 3] and samples [N + 1] as .npy."""

EOS, BOS = "<|endoftext|>", "<|startoftext|>"
"""Specials of our own tokenizers; both always have an id, so that `tokenizer.bos` changes no other id."""

RESERVED = ("hf", "tokens", "sft_chat", "mixture")
"""Corpora that have a name but no code yet."""

Record = dict[str, Any]
"""A JSON object that identifies something."""

IdentifiedFiles = tuple[tuple[SourceFile, str], ...]
"""Files with what identifies each: sha256, or size and time."""

Rule = tuple[Callable[[Config], bool], *tuple[str, ...]]


@dataclass(frozen=True)
class Identity:
    """A corpus with its tokenizer, and the two names that follow from them."""

    key: str
    """Name of the token artifact."""
    record: Record
    """What `key` is the hash of."""
    tokenizer_key: str
    """Name of the tokenizer: of its recipe if it is trained, else of its content."""
    tokenizer_record: Record
    """What `tokenizer_key` is the hash of."""
    files: IdentifiedFiles
    """The corpus's files with what identifies each: sha256, or size and time."""


def canonical(record: Any) -> str:
    """JSON with sorted keys, no spaces and shortest round-trip floats: equal records give equal text."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def key_of(record: Record) -> str:
    """First 16 hex digits of the sha256 of a record."""
    return hashlib.sha256(canonical(record).encode()).hexdigest()[:16]


class Corpora:
    """Corpora that were looked at, so that the jobs of a sweep look once and all at the same files."""

    def __init__(self) -> None:
        self._seen: dict[str, IdentifiedFiles] = {}

    def files(self, config: Config) -> IdentifiedFiles:
        """The files of the config's corpus; raises UserError (4) on an unreadable one."""
        data = config.data
        key = canonical([data.kind, data.identity, data.files, config.paths.data])
        if key not in self._seen:
            self._seen[key] = tuple(_identified_files(config, remember=False))
        return self._seen[key]


def data_key(config: Config, corpora: Corpora | None = None) -> str | None:
    """Key of the token artifact, None for synthetic data; raises UserError (4) on an unreadable corpus.

    `corpora` holds what jobs planned before saw; without it the files are looked at now.
    """
    if config.data.kind == "synthetic":
        return None
    return _identity(config, (corpora or Corpora()).files(config)).key


def identify(config: Config, remember: bool = False) -> Identity:
    """Corpus, tokenizer and keys; `remember` keeps the hashes of new files under `paths.data`."""
    return _identity(config, tuple(_identified_files(config, remember)))


def _identity(config: Config, files: IdentifiedFiles) -> Identity:
    corpus = {"kind": config.data.kind, "files": len(files), "content": _digest_of_files(files)}
    if config.data.identity == "stat":
        corpus["identity"] = "stat"
    rule = _document_rule(config)
    tokenizer = tokenizer_record(config, corpus, rule)
    record = {
        "format": TOKENS_FORMAT,
        "kind": "pretrain",
        "corpus": corpus,
        "rule": rule,
        "split": {
            "method": "sha256-of-text",
            "seed": config.data.split_seed,
            "fraction": float(config.data.holdout),
        },
        "tokenizer": tokenizer,
        "separators": {"eos": 1, "bos": int(config.tokenizer.bos)},
    }
    return Identity(key_of(record), record, key_of(tokenizer), tokenizer, files)


def packs_record(config: Config, tokens_key: str) -> Record:
    """What identifies the packing plans of a token artifact; no seed is in it (PACK-2)."""
    packing = {"sequence_length": config.sequence_length, "packing": config.data.packing}
    return {"format": PLAN_FORMAT, "tokens": tokens_key, **packing}


def vocab_size(config: Config) -> int:
    """Ids that the data may hold: the tokenizer's entries with its specials, or `data.ids` (synthetic)."""
    if config.data.kind == "synthetic":
        return config.data.ids
    if config.tokenizer.kind == "bytes":
        return 256 + len((EOS, BOS))
    if config.tokenizer.kind == "hf":
        return hf_files.read(config.tokenizer).vocab_size
    return config.tokenizer.vocab_size


def check(config: Config) -> list[Problem]:
    """Everything about data and tokenizer that no single key shows; reads no corpus."""
    data = config.data
    if data.kind in RESERVED:
        message = f"{data.kind} is reserved and does not exist yet"
        return [Problem("data", message, "data=stdlib, data=text_files or data=synthetic", "reserved")]
    rules = _SYNTHETIC_RULES if data.kind == "synthetic" else _TEXT_RULES
    problems = [Problem(*rest) for is_wrong, *rest in (*_RULES, *rules) if is_wrong(config)]
    return problems + _vocabulary_problems(config)


_RULES: tuple[Rule, ...] = (
    (lambda c: c.data.prefetch < 1, "data.prefetch", "must be at least 1", "data.prefetch=2"),
    (lambda c: c.data.prepare.workers < 0, "data.prepare.workers", "is negative", "data.prepare.workers=0"),
    (lambda c: c.sequence_length < 2, "sequence_length", "must be at least 2", "sequence_length=256"),
)

_SYNTHETIC_RULES: tuple[Rule, ...] = (
    (
        lambda c: c.tokenizer.kind != "none",
        *("tokenizer", "synthetic data has no text to tokenise", "data=synthetic tokenizer=none"),
    ),
    (lambda c: c.data.ids < 4, "data.ids", "must be at least 4", "data.ids=64"),
    (
        lambda c: c.data.rule == "rules" and c.sequence_length < 3,
        *("sequence_length", "data.rule=rules has no target before the third token", "sequence_length=64"),
        "EVAL-4",
    ),
    (lambda c: c.data.documents < 1, "data.documents", "must be at least 1", "data.documents=4096"),
    (
        lambda c: c.data.document_length is not None and c.data.document_length < 2,
        *("data.document_length", "must be at least 2, or null", "data.document_length=1024"),
    ),
    (
        lambda c: c.data.document_length is not None and c.data.rule in ("copy", "rules"),
        *("data.document_length", "copy and rules are about whole samples", "data.rule=uniform, or null"),
    ),
)

_TEXT_RULES: tuple[Rule, ...] = (
    (
        lambda c: c.data.kind == "text_files" and not c.data.files,
        *("data.files", "text_files needs a glob", """'data.files=["texts/**/*.txt"]'"""),
    ),
    (lambda c: not 0 <= c.data.holdout < 1, "data.holdout", "must be in [0, 1)", "data.holdout=0.05"),
    (
        lambda c: c.data.holdout == 0 and c.evaluation.name == "heldout",
        *("evaluation", "heldout needs held-out documents, and data.holdout=0 keeps none"),
        *("evaluation=none, or data.holdout=0.05", "SPLIT-3"),
    ),
    (lambda c: c.tokenizer.kind == "none", "tokenizer", "none reads no text", "tokenizer=bpe"),
    (
        lambda c: c.tokenizer.kind == "bpe" and c.tokenizer.vocab_size < 256 + len((EOS, BOS)),
        *("tokenizer.vocab_size", "must hold 256 bytes and 2 specials", "tokenizer.vocab_size=8192"),
    ),
    (
        lambda c: c.tokenizer.kind == "bpe" and c.tokenizer.sample_bytes < 1,
        *("tokenizer.sample_bytes", "must be at least 1", "tokenizer.sample_bytes=8000000"),
    ),
)
"""Each rule: is it broken, then the fields of the Problem."""


def _vocabulary_problems(config: Config) -> list[Problem]:
    problems = hf_files.check(config.tokenizer) if config.tokenizer.kind == "hf" else []
    if problems:
        return problems
    given, needed = config.model.vocab_size, vocab_size(config)
    if given is None or given >= needed:
        return []
    message = f"{given} is smaller than the {needed} ids of data={config.data.kind}"
    return [Problem("model.vocab_size", message, f"model.vocab_size={needed}, or null to follow it", "TOK-3")]


def _identified_files(config: Config, remember: bool) -> list[tuple[SourceFile, str]]:
    data = config.data
    assert data.kind in ("stdlib", "text_files"), data.kind
    files = stdlib_files() if data.kind == "stdlib" else matching_files(data.files)
    if data.identity == "stat":
        return [(file, f"stat:{file.size}:{file.stat[3]}") for file in files]
    cache = HashCache(Path(config.paths.data) / "hashes")
    digests = [(file, cache.digest(file)) for file in files]
    if remember:
        cache.save()
    return digests


def _digest_of_files(files: IdentifiedFiles) -> str:
    whole = hashlib.sha256()
    for file, digest in files:
        whole.update(f"{file.name}\0{file.size}\0{digest}\n".encode("utf-8", "surrogateescape"))
    return whole.hexdigest()


def _document_rule(config: Config) -> Record:
    """How files become documents."""
    data = config.data
    if data.kind == "stdlib":
        return {"unit": "file", "encoding": "declared", "on_bad_text": data.on_bad_text}
    rule = {"unit": data.unit, "encoding": "utf-8", "on_bad_text": data.on_bad_text}
    return rule | ({"text_key": data.text_key} if data.unit == "line" else {})


def tokenizer_record(config: Config, corpus: Record, rule: Record) -> Record:
    """What identifies the tokenizer that `config` makes of a corpus and its document rule (TOK-1, TOK-4)."""
    tokenizer = config.tokenizer
    if tokenizer.kind == "bytes":
        return {"kind": "bytes", "specials": [EOS, BOS]}
    if tokenizer.kind == "hf":
        found = hf_files.read(tokenizer)
        content = {"content": found.content, "specials": found.specials, "chat": found.chat_template}
        return {"kind": "hf", "encode_special_tokens": True, **content}
    return {
        "kind": "bpe",
        "format": BPE_FORMAT,
        "corpus": corpus,
        "rule": rule,
        "vocab_size": tokenizer.vocab_size,
        "specials": [EOS, BOS],
        "seed": tokenizer.seed,
        "sample_bytes": tokenizer.sample_bytes,
        "library": f"tokenizers {importlib.metadata.version('tokenizers')}",
    }
