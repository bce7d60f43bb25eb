"""`model.match=PRESET:MEASURE`: a dense model takes another preset's size while it is composed (DENSE-1).

The sizes are written into the config, so ranks, resume and the run's identity see numbers alone.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from src import reserved
from src.composer import Composer
from src.config import Config
from src.errors import Problem
from src.fields import edit_distance
from src.models.schema import DenseConfig, ModelConfig
from src.models.twin import ATTENTION, MEASURES, twin
from src.trainer.data import keys
from src.tree import raise_all, typed

SOLVED = ("intermediate_size", "match_target")
"""Keys that follow from the others."""


def size_like(config: Config, composer: Composer, overrides: Sequence[str]) -> None:
    """Give a dense model that has `match` its sizes.

    Args:
        config: as typed, changed in place.
        composer: knows the presets, and which keys somebody set; those stay as they are.
        overrides: what the config was composed from.

    Raises:
        UserError: unknown preset or measure, a key that follows from the others, or no width left (2).
    """
    model = config.model
    if not isinstance(model, DenseConfig):
        return
    given = composer.given(overrides)
    raise_all(list(_solved(model, given)))
    if model.match is None:
        return
    preset, _, measure = model.match.partition(":")
    raise_all([*_preset_problems(preset, composer), *_measure_problems(preset, measure)])
    other = typed(composer.compose([f"model={preset}"]).config).model
    raise_all(list(_follower(other)))
    if model.vocab_size is None:
        model.vocab_size = keys.vocab_size(config) if other.vocab_size is None else other.vocab_size
    mine = {key.removeprefix("model.") for key in _fields(model) if f"model.{key}" in given}
    config.model = twin(model, other, measure, config.sequence_length, mine)
    raise_all(list(_too_small(config.model, preset, measure)))


def _fields(model: DenseConfig) -> list[str]:
    return list(vars(model))


def _solved(model: DenseConfig, given: Container[str]) -> Iterator[Problem]:
    for name in SOLVED:
        value = getattr(model, name)
        if f"model.{name}" not in given or (model.match is None and name != "match_target"):
            continue
        if model.match is None:
            yield Problem(
                "model.match_target", f"{value} follows from model.match", "leave it out", "DENSE-1"
            )
        else:
            message = f"{value}, but model.match={model.match} decides it"
            yield Problem(f"model.{name}", message, "leave one of the two out", "DENSE-1")


def _preset_problems(preset: str, composer: Composer) -> list[Problem]:
    known = [name for name in composer.options("model") if name.partition("/")[0] in ATTENTION]
    if preset in known:
        return []
    exists = f"what exists: {', '.join(known)}"
    best = min(known, key=lambda name: edit_distance(preset, name))
    near = f"did you mean {best}? " if edit_distance(preset, best) <= 2 else ""
    refused = reserved.refusal("model", preset, known)
    message = f"no preset {preset!r} to follow" if refused is None else refused.message
    return [Problem("model.match", message, near + exists, "DENSE-1")]


def _measure_problems(preset: str, measure: str) -> list[Problem]:
    if measure in MEASURES:
        return []
    fix = " or ".join(f"model.match={preset or 'PRESET'}:{name}" for name in MEASURES)
    message = f"{measure!r} is no measure" if measure else f"no measure behind {preset!r}"
    return [Problem("model.match", message, f"type {fix}", "DENSE-1")]


def _follower(other: ModelConfig) -> Iterator[Problem]:
    """A preset that follows another one has no sizes yet."""
    if isinstance(other, DenseConfig) and other.match is not None:
        message = f"{other.name} itself follows {other.match}"
        yield Problem("model.match", message, f"type model.match={other.match}", "DENSE-1")


def _too_small(model: DenseConfig, preset: str, measure: str) -> Iterator[Problem]:
    if model.intermediate_size < 1:
        message = f"no FFN is left: all else counts more than the {model.match_target:,} {MEASURES[measure]}"
        fix = f"fewer model.num_layers or a smaller model.hidden_size than {preset}'s"
        yield Problem("model.match", f"{message} of {preset}", fix, "DENSE-1")
