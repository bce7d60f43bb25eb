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


def prepare(config: Config, report: Report) -> Prepared:
    """Build tokenizer, token artifact and packing plans that are not in the store yet.

    `report` takes a line for each that is built. Raises UserError (4) if one cannot be built, and at once if
    one is missing under `data.prepare.where=never`.
    """
    if config.data.kind == "synthetic":
        return Prepared(None, None, False)
    identity = identify(config, remember=config.data.prepare.where != "never")
    store = open_store(config, report)
    if config.data.prepare.where == "never":
        _require(store, identity)
    tokens, built = _ensure_tokens(config, identity, store, report)
    _ensure_plans(config, identity.key, tokens, store)
    return Prepared(identity.key, tokens.path, built)


def verify_data(config: Config, prepared: Prepared) -> list[str]:
    """Read every file of what `prepare` found whole; returns the directories that are as their manifests say.

    Raises UserError (4) naming the first file whose bytes or offsets are wrong.
    """
    from src.trainer.data.tokens import SIDES, TokenFile

    if prepared.key is None:
        return []
    store = open_store(config, lambda line: None)
    try:
        tokens = verify(store.directory("tokens", prepared.key), prepared.key)
        found = [("tokens", prepared.key), ("packs", key_of(packs_record(config, prepared.key)))]
        if config.tokenizer.kind == "bpe":
            found.append(("tokenizers", key_of(tokens["record"]["tokenizer"])))
        directories = [store.directory(section, key) for section, key in found]
        for directory in directories[1:]:
            verify(directory, directory.name)
    except NotReadyError as reason:
        raise UserError(str(reason), code=4) from reason
    for side in SIDES:
        TokenFile(directories[0], side, tokens).check_order()
    return [str(directory) for directory in directories]


def open_store(config: Config, report: Report) -> Store:
    """The store below `paths.data`."""
    return Store(Path(config.paths.data), seconds(config.data.prepare.timeout), report)


def _require(store: Store, identity: Identity) -> None:
    try:
        store.open("tokens", identity.key)
    except NotReadyError as reason:
        raise UserError(
            f"data.prepare.where=never and the token artifact {identity.key} is not ready: {reason}."
            " Build it with: python scripts/prepare_data.py and the same overrides",
            code=4,
        ) from reason


def _ensure_tokens(config: Config, identity: Identity, store: Store, report: Report) -> tuple[Artifact, bool]:
    try:
        return store.open("tokens", identity.key), False
    except NotReadyError:
        pass
    from src.trainer.data.encode import build_tokens

    tokenizer = _ensure_tokenizer(config, identity, store, report)

    def build(directory: Path, lease: Lease) -> Record:
        started, tally = time.monotonic(), Tally()
        corpus = documents(config.data, tuple(file for file, _ in identity.files), tally)
        fields = build_tokens(config, corpus, tally, tokenizer, directory, lease)
        counts = f"{fields['tokens']['train']:,} + {fields['tokens']['heldout']:,} held-out tokens"
        report(f"tokenised {config.data.kind}: {counts} in {time.monotonic() - started:.1f} s")
        return {**fields, **_provenance()}

    space = 4 * sum(file.size for file, _ in identity.files)
    return store.ensure("tokens", identity.record, build, space)


def _ensure_tokenizer(config: Config, identity: Identity, store: Store, report: Report) -> Path | None:
    """Directory of the trained tokenizer; None for a kind that is not trained."""
    if config.tokenizer.kind != "bpe":
        return None
    from src.trainer.data.bpe import build_bpe

    def corpus() -> Iterator[Document]:
        return documents(config.data, tuple(file for file, _ in identity.files), Tally())

    def build(directory: Path, lease: Lease) -> Record:
        started = time.monotonic()
        fields = build_bpe(corpus, config.tokenizer, directory, lease)
        report(
            f"trained a tokenizer of {fields['vocab_size']:,} entries in {time.monotonic() - started:.1f} s"
        )
        return {**fields, **_provenance()}

    space = 200 * config.tokenizer.vocab_size
    return store.ensure("tokenizers", identity.tokenizer_record, build, space)[0].path


def _ensure_plans(config: Config, key: str, tokens: Artifact, store: Store) -> Artifact:
    record = packs_record(config, key)
    try:
        return store.open("packs", key_of(record))
    except NotReadyError:
        pass
    from src.trainer.data.pack import make_plan
    from src.trainer.data.tokens import SIDES, TokenFile

    def build(directory: Path, lease: Lease) -> Record:
        samples = {}
        for side in SIDES:
            lengths = TokenFile(tokens.path, side, tokens.manifest).lengths
            plan = make_plan(lengths, config.sequence_length, config.data.packing)
            plan.save(directory, side)
            samples[side] = len(plan)
        return {"samples": samples, **_provenance()}

    space = 32 * sum(tokens.manifest["tokens"].values())
    return store.ensure("packs", record, build, space)[0]


def _provenance() -> Record:
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {"versions": {"python": platform.python_version(), **versions}}
