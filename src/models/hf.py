"""A causal language model that transformers builds from a directory: what we must know of it.

`model=hf model.path=DIR` describes the architecture by `DIR/config.json` alone. Numbers that plans, metrics
and meshes need come from there as transformers reads it, for what the file leaves out is the class's default:
a window, or a tied head. So this family alone imports transformers where a run is composed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from src.errors import Problem, UserError
from src.models.schema import HfConfig

INSTALL = "pip install 'transformers>=5.17,<6'"
WEIGHTS = ("*.safetensors", "*.bin")


def load_package() -> Any:
    """The module `transformers`.

    Raises:
        UserError: it is not installed, or cannot be imported (3).
    """
    try:
        return import_module("transformers")
    except ImportError as error:
        message = f"transformers needs a package that cannot be imported: {error}"
        raise UserError([Problem("backend", message, INSTALL, rule="backend")], code=3) from error


def fill(model: HfConfig) -> None:
    """Read the numbers of the architecture, and a digest of what the directory holds.

    Raises:
        UserError: there is no readable `config.json`, or it describes no decoder that we can tell (2).
    """
    told = description(model.path)
    wanted = {key: told.get(name) for key, name in _NAMES.items()}
    missing = [_NAMES[key] for key, value in wanted.items() if not isinstance(value, int)]
    if missing:
        message = f"{model.path}/config.json does not say {', '.join(missing)}"
        raise UserError([Problem("model.path", message, "the directory of a causal language model", "CFG-7")])
    experts = ("num_experts", "num_local_experts", "n_routed_experts")
    wanted |= {
        "num_experts": next((int(told[name]) for name in experts if told.get(name)), 0),
        "top_k": int(told.get("num_experts_per_tok") or 0),
        "head_dim": int(told.get("head_dim") or told["hidden_size"] // told["num_attention_heads"]),
        "context": int(told.get("max_position_embeddings") or HfConfig().context),
        "rms_norm_eps": float(told.get("rms_norm_eps") or HfConfig().rms_norm_eps),
        "tie_embeddings": bool(told.get("tie_word_embeddings", False)),
    }
    problems = list(_contradicted(model, wanted))
    if problems:
        raise UserError(problems)
    for key, value in wanted.items():
        setattr(model, key, value)
    model.content = digest(Path(model.path))


def _contradicted(model: HfConfig, told: dict[str, Any]) -> Iterator[Problem]:
    """Keys that were set to something else than the directory says; they would be lost unseen."""
    untouched = HfConfig()
    for key, value in told.items():
        given = getattr(model, key)
        if given not in (value, getattr(untouched, key)):
            message = f"{given}, but {model.path}/config.json says {value}"
            yield Problem(f"model.{key}", message, f"leave model.{key} out, or change the file", "CFG-7")


_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
"""Key of ours → key of `config.json`, without which nothing can be planned."""


def description(path: str) -> dict[str, Any]:
    """What `config.json` says, and the defaults of its class for what it does not."""
    try:
        return _description(path, (Path(path) / "config.json").read_text())
    except (OSError, UnicodeDecodeError) as error:
        message = f"{path}/config.json cannot be read: {error}"
        raise UserError([Problem("model.path", message, "a directory with config.json", "CFG-7")]) from error


@cache
def _description(path: str, text: str) -> dict[str, Any]:
    """Asked of transformers once for each content."""
    found: dict[str, Any] = settings_of(load_package(), path).to_dict()
    return found


def digest(path: Path) -> str:
    """Digest of the description and of the weight files' names and sizes: another model is another run."""
    files = [(file.name, file.stat().st_size) for pattern in WEIGHTS for file in sorted(path.glob(pattern))]
    text = (path / "config.json").read_text() + json.dumps(files)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def has_weights(path: str) -> bool:
    """Whether the directory holds weights beside the description."""
    return any(next(Path(path).glob(pattern), None) is not None for pattern in WEIGHTS)


def is_windowed(path: str) -> bool:
    """Whether some layer sees only part of what lies before a token; a mask of ours would hide that."""
    told = description(path)
    kinds = set(told.get("layer_types") or [])
    slides = told.get("sliding_window") is not None and told.get("use_sliding_window", True)
    return bool(kinds - {"full_attention"}) or (not kinds and slides)


def parts(causal_lm: Any) -> tuple[Any, Any]:
    """Decoder and head of transformers' model.

    Raises:
        UserError: they are not where they are in models like Llama (3).
    """
    decoder, head = causal_lm.base_model, causal_lm.get_output_embeddings()
    if not (hasattr(decoder, "layers") and hasattr(decoder, "embed_tokens")) or head is None:
        message = f"{type(causal_lm).__name__} has no decoder with embed_tokens and layers under one head"
        raise UserError([Problem("model.path", message, "a decoder such as Llama's", "backend")], code=3)
    return decoder, head


def named(causal_lm: Any) -> dict[str, Any]:
    """Parameters by the names under which our step holds them; a tied head is not named twice."""
    decoder, head = parts(causal_lm)
    found = {f"model.{name}": parameter for name, parameter in decoder.named_parameters()}
    known = {id(parameter) for parameter in found.values()}
    return found | {f"lm_head.{n}": p for n, p in head.named_parameters() if id(p) not in known}


def shapes(model: HfConfig) -> dict[str, tuple[int, ...]]:
    """Unsharded shape of each parameter, from transformers' own model without memory."""
    return dict(_shapes(model.path, model.content))


@cache
def _shapes(path: str, content: str | None) -> dict[str, tuple[int, ...]]:
    import torch

    package = load_package()
    with torch.device("meta"):
        causal_lm = package.AutoModelForCausalLM.from_config(settings_of(package, path))
    return {name: tuple(parameter.shape) for name, parameter in named(causal_lm).items()}


def settings_of(package: Any, path: str) -> Any:
    """transformers' config of the directory; nothing is fetched and no code of the directory runs."""
    try:
        return package.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        message = f"transformers cannot read {path}: {error}"
        raise UserError([Problem("model.path", message, "a model that it knows", "backend")]) from error
