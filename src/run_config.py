"""The config of a run that is there, for one process that looks at it: `RUN/config.yaml` and few changes.

No torch here, so that a refusal is quick (CFG-18).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from src.compose import check_overrides, config_loader, finish, load_config, typed
from src.composer import Composer
from src.config import Config, DeterminismConfig, LauncherConfig, MeshConfig, PipelineConfig
from src.errors import Problem, UserError
from src.overrides import parse
from src.tree import raise_all

CHANGEABLE = ("data", "evaluation.samples", "kernels", "micro_batch_size", "paths.data", "platform")
"""Keys, and groups with all below them, that an evaluation may have otherwise than the run it looks at."""


@dataclass(frozen=True)
class Configs:
    """What a run was trained with, and what it is evaluated with, both on one process."""

    own: Config
    """As in `RUN/config.yaml`, on one process."""
    wanted: Config
    """With the overrides, resolved and validated."""
    other_data: bool
    """Whether an override says anything about the data."""


def configs_of_run(run: Path, overrides: Sequence[str], all_samples: bool = False) -> Configs:
    """Load the run's config and apply `overrides`, which are typed as for `train.py`.

    Args:
        run: the run directory.
        overrides: of keys in `CHANGEABLE`; `data=NAME` takes that option in place of the run's data.
        all_samples: evaluate the whole held-out set, whatever `evaluation.samples` says.

    Raises:
        UserError: 2, with every wrong override at once; there is no such run; what is asked for contradicts
            itself, or its text needs another tokenizer than the run's.
    """
    check_overrides(overrides, multirun=False)
    keys = _keys(overrides)
    raise_all([_not_changeable(key) for key in keys if not _is_changeable(key)])
    if not (run / "config.yaml").is_file():
        fix = "type run=RUN, a directory such as runs/NAME that holds config.yaml"
        raise UserError([Problem("run", f"there is no run in {run}", fix, "EVAL-6")])
    own = load_config(run / "config.yaml")
    wanted = copy.deepcopy(own)
    with config_loader() as loader:
        typed_in = typed(Composer(loader).compose(overrides).config)
    if "data" in keys:
        raise_all(_other_text(own, typed_in))
    for key in keys:
        _copy(key, typed_in, wanted)
    wanted.evaluation.name, wanted.evaluation.prompts = "heldout", []
    if all_samples:
        wanted.evaluation.samples = None
    other_data = any(key.partition(".")[0] == "data" for key in keys)
    return Configs(finish(_alone(own)), finish(_alone(wanted)), other_data)


def _keys(overrides: Sequence[str]) -> list[str]:
    """Keys and groups in the order typed; the lines are known to parse."""
    parser = OverridesParser.create()
    return [item.key for line in overrides for item in parse(line, parser)[0]]


def _is_changeable(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in CHANGEABLE)


def _not_changeable(key: str) -> Problem:
    fix = f"what may differ: {', '.join(CHANGEABLE)}"
    return Problem(key, "is the run's own and not for an evaluation to change", fix, "EVAL-6")


def _other_text(own: Config, typed_in: Config) -> list[Problem]:
    """Text asks for a tokenizer and synthetic tokens for none: the run has one or the other."""
    theirs = own.tokenizer.kind
    if (typed_in.data.kind == "synthetic") == (theirs == "none"):
        return []
    what = "has no text" if typed_in.data.kind == "synthetic" else "is text"
    message = f"{typed_in.data.kind} {what}, and the run's tokenizer is {theirs}"
    fix = "data that the run's tokenizer reads: synthetic for none, text for the others"
    return [Problem("data", message, fix, "TOK-3")]


def _copy(key: str, source: Any, target: Any) -> None:
    *path, last = key.split(".")
    for name in path:
        source, target = getattr(source, name), getattr(target, name)
    setattr(target, last, getattr(source, last))


def _alone(config: Config) -> Config:
    """One process here: no mesh, schedule or launcher, and nothing of how a run is begun or gone on with."""
    config.mesh, config.pipeline, config.launcher = MeshConfig(), PipelineConfig(), LauncherConfig()
    config.determinism = DeterminismConfig()
    config.resume = "auto"
    return config
