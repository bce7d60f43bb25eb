"""A corpus of a few dozen short texts, and configs that read it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from src.config import Config
from src.trainer.data.prepare import Prepared, prepare

WORDS = (
    "def",
    "return",
    "import",
    "self",
    "value",
    "for",
    "naïve",
    "日本",
    "zip",
    "yield",
    "None",
    "42",
    "==",
    "(",
    ":",
)


def texts(count: int = 60, seed: int = 5) -> list[str]:
    """Distinct texts of 3 to 120 words."""
    draw = random.Random(seed)
    return [f"{i} " + " ".join(draw.choices(WORDS, k=draw.randint(3, 120))) for i in range(count)]


def write_corpus(directory: Path, contents: list[str]) -> Path:
    """One file a text, named so that name order is list order."""
    directory.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(contents):
        (directory / f"{i:04d}.txt").write_text(text, encoding="utf-8")
    return directory


def small_config(root: Path, corpus: Path | None = None, **changes: Any) -> Config:
    """text_files over `corpus` (written if None), bytes, 24 positions; `changes` by dotted key with `__`."""
    if corpus is None:
        corpus = root / "corpus"
        if not corpus.exists():
            write_corpus(corpus, texts())
    config = Config()
    config.paths.data = str(root / "store")
    config.data.kind, config.data.files = "text_files", [f"{corpus}/**/*.*"]
    config.data.holdout = 0.2
    config.tokenizer.kind, config.tokenizer.vocab_size = "bytes", 300
    config.sequence_length, config.global_batch_size, config.micro_batch_size = 24, 12, 2
    for key, value in changes.items():
        *path, last = key.split("__")
        target: Any = config
        for name in path:
            target = getattr(target, name)
        setattr(target, last, value)
    return config


def synthetic_config(rule: str, **changes: Any) -> Config:
    """64 ids, 40 documents, 64 positions."""
    config = small_config(Path("nowhere"), Path("nowhere"), **changes)
    config.data.kind, config.data.rule, config.tokenizer.kind = "synthetic", rule, "none"
    config.data.files = []
    if "sequence_length" not in changes:
        config.sequence_length = 64
    if "data__documents" not in changes:
        config.data.documents = 40
    return config


def prepared(config: Config) -> Prepared:
    """`prepare` without a word."""
    return prepare(config, lambda line: None)


def start(root: Path, seed: int) -> None:
    """A start in a process of its own; here, so that the process imports no test and no torch."""
    prepared(small_config(root, tokenizer__kind="bpe", seed=seed))
