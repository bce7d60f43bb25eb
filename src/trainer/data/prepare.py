"""Make sure that everything a run reads is in the store; what is there already costs nothing (PREP-1)."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from src.config import Config
from src.durations import seconds
from src.errors import UserError
from src.trainer.data.documents import Document, Tally, documents
from src.trainer.data.keys import Identity, Record, identify, key_of, packs_record
from src.trainer.data.lease import Lease
from src.trainer.data.store import Artifact, NotReadyError, Report, Store, verify

LIBRARIES = ("numpy", "tokenizers")
"""Packages whose versions a manifest records."""


@dataclass(frozen=True)
class Prepared:
    """What `prepare` found or made."""

    key: str | None
    """Key of the token artifact; None for synthetic data, which has none."""
    path: Path | None
    built: bool
    """Whether this call tokenised."""


@dataclass(frozen=True)
class Stored:
    """What a run reads from the store."""

    tokens: Artifact
    packs: Artifact
    tokenizer: Artifact | None
    """None for a tokenizer that is not trained."""


def prepare(config: Config, report: Report, attempt: str = "") -> Prepared:
    """Build tokenizer, token artifact and packing plans that are not in the store yet.

    `report` takes a line for each that is built; what fails for one process fails for all that work for the
    same `attempt` (LEASE-6). Raises UserError (4) if one cannot be built, and at once if one is missing under
    `data.prepare.where=never`.
    """
    if config.data.kind == "synthetic":
        return Prepared(None, None, False)
    may_build = config.data.prepare.where != "never"
    identity = identify(config, remember=may_build)
    store = _store(config, report, attempt)
    if not may_build:
        return Prepared(identity.key, open_stored(config, identity.key).tokens.path, False)
    tokenizer = _ensure_tokenizer(config, identity, store, report)
    tokens, built = _ensure_tokens(config, identity, tokenizer, store, report)
    _ensure_plans(config, identity.key, tokens, store)
    return Prepared(identity.key, tokens.path, built)


def verify_data(config: Config, prepared: Prepared) -> list[str]:
    """Read every file of what `prepare` found whole; returns the directories that are as their manifests say.

    Raises UserError (4) naming the first file whose bytes or offsets are wrong.
    """
    from src.trainer.data.tokens import SIDES, TokenFile

    if prepared.key is None:
        return []
    stored = open_stored(config, prepared.key)
    paths = [found.path for found in (stored.tokens, stored.packs, stored.tokenizer) if found is not None]
    try:
        for path in paths:
            verify(path, path.name)
    except NotReadyError as reason:
        raise UserError(str(reason), code=4) from reason
    for side in SIDES:
        TokenFile(stored.tokens.path, side, stored.tokens.manifest["vocab_size"])
    return [str(path) for path in paths]


def open_stored(config: Config, key: str) -> Stored:
    """The artifacts of the token artifact `key`; UserError (4) with what to type if one is not ready."""
    store = _store(config, lambda line: None)
    try:
        tokens = store.open("tokens", key)
        packs = store.open("packs", key_of(packs_record(config, key)))
        trained = key_of(tokens.manifest["record"]["tokenizer"])
        is_trained = config.tokenizer.kind == "bpe"
        return Stored(tokens, packs, store.open("tokenizers", trained) if is_trained else None)
    except NotReadyError as reason:
        command = "python scripts/prepare_data.py build and the same overrides"
        raise UserError(f"data {key} is not ready: {reason}. Build it with: {command}", code=4) from reason


def _store(config: Config, report: Report, attempt: str = "") -> Store:
    return Store(Path(config.paths.data), seconds(config.data.prepare.timeout), report, attempt)


def _ensure_tokens(
    config: Config, identity: Identity, tokenizer: Path | None, store: Store, report: Report
) -> tuple[Artifact, bool]:
    def build(directory: Path, lease: Lease) -> Record:
        from src.trainer.data.encode import build_tokens

        started, tally = time.monotonic(), Tally()
        corpus = documents(config.data, tuple(file for file, _ in identity.files), tally)
        fields = build_tokens(config, corpus, tally, tokenizer, directory, lease)
        counts = f"{fields['tokens']['train']:,} + {fields['tokens']['heldout']:,} held-out tokens"
        report(f"tokenised {config.data.kind}: {counts} in {time.monotonic() - started:.1f} s")
        return {**fields, **_provenance(config)}

    space = 4 * sum(file.size for file, _ in identity.files)
    return store.ensure("tokens", identity.record, build, space)


def _ensure_tokenizer(config: Config, identity: Identity, store: Store, report: Report) -> Path | None:
    """Directory of the trained tokenizer; None for a kind that is not trained."""
    if config.tokenizer.kind != "bpe":
        return None

    def corpus() -> Iterator[Document]:
        return documents(config.data, tuple(file for file, _ in identity.files), Tally())

    def build(directory: Path, lease: Lease) -> Record:
        from src.trainer.data.bpe import build_bpe

        started = time.monotonic()
        fields = build_bpe(corpus, config.tokenizer, directory, lease)
        report(
            f"trained a tokenizer of {fields['vocab_size']:,} entries in {time.monotonic() - started:.1f} s"
        )
        return {**fields, **_provenance(config)}

    space = 200 * config.tokenizer.vocab_size
    return store.ensure("tokenizers", identity.tokenizer_record, build, space)[0].path


def _ensure_plans(config: Config, key: str, tokens: Artifact, store: Store) -> None:
    def build(directory: Path, lease: Lease) -> Record:
        from src.trainer.data.pack import make_plan
        from src.trainer.data.tokens import SIDES, TokenFile

        samples = {}
        for side in SIDES:
            lengths = TokenFile(tokens.path, side, tokens.manifest["vocab_size"]).lengths
            plan = make_plan(lengths, config.sequence_length, config.data.packing)
            plan.save(directory, side)
            samples[side] = len(plan)
        return {"samples": samples, **_provenance(config)}

    space = 32 * sum(tokens.manifest["tokens"].values())
    store.ensure("packs", packs_record(config, key), build, space)


def _provenance(config: Config) -> Record:
    """Where an artifact comes from and what made it: for people, no part of any key."""
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    source = config.data.files or [config.data.kind]
    return {"source": source, "versions": {"python": platform.python_version(), **versions}}
