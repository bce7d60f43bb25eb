"""The files of a Hugging Face tokenizer, read as JSON: what it is, without loading it (TOK-1)."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from src.config import TokenizerConfig
from src.errors import Problem, UserError

NOT_CONTENT = ("truncation", "padding")
"""Parts of `tokenizer.json` that a mere use of the tokenizer changes."""


@dataclass(frozen=True)
class HfTokenizerFiles:
    """What the files say."""

    tokenizer_json: str
    """`tokenizer.json` as JSON text without truncation and padding."""
    content: str
    """sha256 of `tokenizer_json`."""
    specials: dict[str, str | None]
    """Texts of `bos` and `eos`."""
    chat_template: str | None
    """sha256 of the chat template, None without one."""
    vocab_size: int
    """Largest id plus one."""


def check(config: TokenizerConfig) -> list[Problem]:
    """Why `config` names no usable tokenizer; empty if it does."""
    if config.path is None:
        fix = "tokenizer.path=DIRECTORY, or a name on the hub with tokenizer.revision=COMMIT"
        return [Problem("tokenizer.path", "tokenizer=hf needs a path", fix)]
    try:
        found = read(config)
    except UserError as error:
        return [Problem("tokenizer.path", str(error), "a directory that holds tokenizer.json")]
    wanted = ("eos", "bos") if config.bos else ("eos",)
    missing = [name for name in wanted if found.specials[name] is None]
    return [Problem("tokenizer.path", f"{config.path} names no {name}_token") for name in missing]


def read(config: TokenizerConfig) -> HfTokenizerFiles:
    """Read the tokenizer at `tokenizer.path`; raises UserError (2) if it is not there or not a tokenizer."""
    path = _locate(config)
    parts = (path, path.with_name("tokenizer_config.json"), path.with_name("chat_template.jinja"))
    return _read(*parts, stamps=tuple(_stamp(part) for part in parts))


def _stamp(path: Path) -> tuple[int, int, int, int] | None:
    """What changes with a file; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@lru_cache(maxsize=4)
def _read(
    path: Path, settings_path: Path, template_path: Path, stamps: tuple[tuple[int, int, int, int] | None, ...]
) -> HfTokenizerFiles:
    """The files with these stamps; every job of a sweep asks three times."""
    whole = _json(path)
    if "model" not in whole:
        raise UserError(f"{path} is not a tokenizer: it has no model")
    for part in NOT_CONTENT:
        whole.pop(part, None)
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    settings = _json(settings_path) if settings_path.exists() else {}
    # Newer files keep the template apart.
    template = template_path.read_text() if template_path.exists() else settings.get("chat_template")
    return HfTokenizerFiles(
        tokenizer_json=text,
        content=hashlib.sha256(text.encode()).hexdigest(),
        specials={name: _special(settings.get(f"{name}_token")) for name in ("bos", "eos")},
        chat_template=None if template is None else hashlib.sha256(json.dumps(template).encode()).hexdigest(),
        vocab_size=_largest_id(whole) + 1,
    )


def _locate(config: TokenizerConfig) -> Path:
    """`tokenizer.json` in a local directory, or in the hub's cache under a pinned commit; no network."""
    path = Path(config.path or "").expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if path.is_file():
        return path
    revision = config.revision or ""
    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise UserError(
            f"no file {path}; a name on the hub needs a commit as tokenizer.revision, not {revision!r}"
        )
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(str(config.path), "tokenizer.json", revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    command = f"hf download {config.path} tokenizer.json tokenizer_config.json --revision {revision}"
    raise UserError(f"{config.path} at {revision} is not in the cache; run: {command}")


def _json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error
    if not isinstance(read, dict):
        raise UserError(f"{path}: not a JSON object")
    return read


def _special(token: str | dict[str, Any] | None) -> str | None:
    """The text of a special token; the file holds the text, or an object that holds it."""
    return token["content"] if isinstance(token, dict) else token


def _largest_id(whole: dict[str, Any]) -> int:
    vocabulary = whole["model"].get("vocab", {})
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    added = (token["id"] for token in whole.get("added_tokens", []))
    return max(map(int, [-1, *ids, *added]))
