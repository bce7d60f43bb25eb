"""The data of a run, opened for reading: both sides packed, tokenizer, lines of counts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from src.config import Config
from src.errors import UserError
from src.trainer.data import keys
from src.trainer.data.baselines import Baselines, measure
from src.trainer.data.pack import Plan, make_plan
from src.trainer.data.packed import Packed
from src.trainer.data.prepare import Stored, open_stored
from src.trainer.data.store import Artifact
from src.trainer.data.synthetic import SyntheticSource
from src.trainer.data.tokenizer import Tokenizer, load_tokenizer
from src.trainer.data.tokens import SIDES, TokenFile


@dataclass(frozen=True)
class Data:
    """What training, evaluation and sampling read."""

    config: Config
    key: str | None
    """Key of the token artifact, None for synthetic data."""
    manifest: dict[str, Any]
    """The token artifact's manifest, empty for synthetic data."""
    train: Packed
    heldout: Packed
    """Without samples if `data.holdout` is 0."""
    tokenizer_path: Path | None = None
    """Directory of a trained tokenizer."""

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Loaded when first asked for, None for synthetic data; UserError (2) if its content is another."""
        if self.key is None:
            return None
        tokenizer = load_tokenizer(self.config.tokenizer, self.tokenizer_path)
        if tokenizer.content != self.manifest["tokenizer"]:
            raise UserError(
                f"tokenizer {tokenizer.content[:16]} is not {self.manifest['tokenizer'][:16]} of the data"
            )
        return tokenizer

    @cached_property
    def baselines(self) -> Baselines:
        """What counts alone reach on the held-out side (EVAL-5); synthetic data is counted when asked for."""
        if self.key is not None:
            return Baselines(**self.manifest["baselines"])
        train, heldout = self.train.source, self.heldout.source
        assert isinstance(train, SyntheticSource)
        assert isinstance(heldout, SyntheticSource)
        return measure(train.neighbours(), heldout.neighbours(), self.config.data.ids, None)


def open_data(config: Config, key: str | None = None) -> Data:
    """Open what `prepare` has put into the store; builds nothing.

    `key` is the one that the launching process found, so that no rank decides it; None computes it here.
    Raises UserError: 4 if an artifact is not ready, 2 if the vocabulary or the training set is too small.
    """
    data = _synthetic(config) if config.data.kind == "synthetic" else _stored(config, key)
    size, batch = len(data.train), config.global_batch_size
    if size == 0:
        raise UserError("the training side has no two tokens in a row to learn from", code=4)
    if config.data.epoch_tail == "drop" and size < batch:
        raise UserError(f"data.epoch_tail=drop leaves nothing of {size} samples at global_batch_size={batch}")
    return data


def _stored(config: Config, key: str | None) -> Data:
    key = keys.data_key(config) if key is None else key
    assert key is not None
    stored = open_stored(config, key)
    _check_tokenizer(config, stored.tokens)
    train, heldout = (_packed(config, stored, side) for side in SIDES)
    trained = None if stored.tokenizer is None else stored.tokenizer.path
    return Data(config, key, stored.tokens.manifest, train, heldout, trained)


def _check_tokenizer(config: Config, tokens: Artifact) -> None:
    """TOK-3: the data was made with the tokenizer of the config, and the model has a row for every id."""
    record = tokens.manifest["record"]
    ours = keys.key_of(keys.tokenizer_record(config, record["corpus"], record["rule"]))
    theirs = keys.key_of(record["tokenizer"])
    if ours != theirs:
        raise UserError(f"tokenizer {ours} of the config is not {theirs}, which made {tokens.path}")
    vocabulary = config.model.vocab_size or keys.vocab_size(config)
    if tokens.manifest["max_id"] >= vocabulary:
        raise UserError(
            f"{tokens.path} holds id {tokens.manifest['max_id']}, model.vocab_size is {vocabulary}"
        )


def _packed(config: Config, stored: Stored, side: str) -> Packed:
    source = TokenFile(stored.tokens.path, side, stored.tokens.manifest["vocab_size"])
    return Packed(source, Plan.load(stored.packs.path, side), config.sequence_length)


def _synthetic(config: Config) -> Data:
    def packed(side: str) -> Packed:
        source = SyntheticSource(config, side)
        plan = make_plan(source.lengths, config.sequence_length, config.data.packing)
        return Packed(source, plan, config.sequence_length)

    return Data(config, None, {}, packed("train"), packed("heldout"))
