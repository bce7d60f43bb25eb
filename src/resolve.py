"""What a config says only together with this place and machine, written into it once (CFG-13)."""

from __future__ import annotations

import copy
import os
from pathlib import Path

from src.config import Config
from src.errors import Problem, UserError
from src.models.hf import fill
from src.models.schema import HfConfig
from src.trainer.data import keys
from src.trainer.parallel import layout


def resolve(config: Config, devices: int = 1) -> Config:
    """A copy in which nothing depends on the place or the machine any more; again and again the same.

    Paths become absolute against the working directory (CFG-13), a null `model.vocab_size` follows the
    tokenizer, and `mesh=auto` is filled for `devices` devices.
    """
    config = copy.deepcopy(config)
    _resolve_paths(config)
    if isinstance(config.model, HfConfig):
        config.model.path = _absolute(config.model.path)
        fill(config.model)
    if config.model.vocab_size is None:
        config.model.vocab_size = keys.vocab_size(config)
    if config.mesh.spec == "auto":
        config.mesh = layout.auto(config, devices)
    return config


def _resolve_paths(config: Config) -> None:
    config.paths.runs = _absolute(config.paths.runs)
    config.paths.data = _absolute(config.paths.data)
    config.data.files = [_absolute(pattern) for pattern in config.data.files]
    for part, name in ((config.paths, "cache"), (config.logger, "copy_to"), (config, "init_from")):
        value = getattr(part, name)
        setattr(part, name, None if value is None else _absolute(value))
    if config.kernels.gemm_tuning != "none":
        config.kernels.gemm_tuning = _absolute(config.kernels.gemm_tuning)
    config.launcher.exclude = _nodes(config.launcher.exclude)
    image = config.container.image
    if image is not None and image.startswith((".", "~")):
        config.container.image = _absolute(image)
    if "/" in config.resume:
        config.resume = _absolute(config.resume)
    path = config.tokenizer.path
    if path is not None and Path(path).expanduser().exists():
        config.tokenizer.path = _absolute(path)


def _nodes(text: str | None) -> str | None:
    """`@FILE` as the nodes that the file lists, by commas or lines; None if it lists none (CHECK-2).

    Raises:
        UserError: there is no such file.
    """
    if text is None or not text.startswith("@"):
        return text
    try:
        listed = Path(text[1:]).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        message = f"{text[1:]} cannot be read: {error.strerror}"
        fix = "type launcher.exclude=@FILE, a list of nodes such as scripts/doctor.py --nodes writes"
        raise UserError([Problem("launcher.exclude", message, fix, "CHECK-2")]) from error
    return ",".join(listed.replace(",", " ").split()) or None


def _absolute(path: str) -> str:
    return os.path.abspath(Path(path).expanduser())
