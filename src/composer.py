"""Hydra's loader, asked once for whatever several jobs share (CFG-1, CFG-2, SWEEP-1).

Most jobs of a sweep choose the same groups and differ in values. Files, defaults list and tree follow from
the choices alone, so they are read, checked and merged once for each set of choices; a job costs a copy of
that tree and its own values. Nothing here outlives one command: the next one reads every file again.

The one file that uses private names of Hydra, whose version is pinned; a test holds each tree to Hydra's own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from src import overrides as lines
from src.conf_files import Source, check_file, read
from src.errors import Problem, UserError
from src.fields import schema_of
from src.models.schema import FAMILIES
from src.overrides import Typed
from src.tree import raise_all

FAILURES = (HydraException, OmegaConfBaseException, YAMLError)
"""What Hydra raises where a config cannot be composed; a file that is no YAML comes through as it is."""

ROOT = "train"
"""The config that `train.py` composes."""


@dataclass(frozen=True)
class Tree:
    """A composed config, not yet typed."""

    config: DictConfig
    is_multirun: bool
    """Whether a group set Hydra's mode to MULTIRUN."""


@dataclass(frozen=True)
class _Choices:
    """The overrides that decide which files are read, and what is wrong with those files."""

    lines: tuple[str, ...]
    """As Hydra takes them; choices that do not exist are left out."""
    family: str
    wrong: tuple[Problem, ...]
    """Choices that do not exist."""
    wrong_files: tuple[Problem, ...]


@dataclass(frozen=True)
class _Request:
    """The overrides of one job, sorted."""

    hydra: tuple[str, ...]
    choices: tuple[Typed, ...]
    values: tuple[Typed, ...]
    unparsed: tuple[Problem, ...]


class Composer:
    """Composes the jobs of one command."""

    def __init__(self, loader: ConfigLoader) -> None:
        assert isinstance(loader, ConfigLoaderImpl)
        self._loader = loader
        self._parser = OverridesParser.create()
        self._groups = lines.Groups(loader)
        self._parsed: dict[str, tuple[list[Typed], list[Problem]]] = {}
        self._chosen: dict[tuple[tuple[str, ...], bool], _Choices] = {}
        self._checked: dict[tuple[Source, str], list[Problem]] = {}
        self._repositories: dict[tuple[str, ...], CachingConfigRepository] = {}
        self._lists: dict[tuple[str, ...], DefaultsList] = {}
        self._trees: dict[tuple[str, ...], Tree] = {}
        self._written: dict[tuple[str, ...], frozenset[str]] = {}

    def problems(self, overrides: Sequence[str], multirun: bool) -> list[Problem]:
        """Everything wrong with the overrides, all values of a sweep, and the files they choose."""
        return self._problems(self._request(overrides), multirun)

    def compose(self, overrides: Sequence[str]) -> Tree:
        """The tree of one job; raises `UserError` with every problem of its overrides and files."""
        request = self._request(overrides)
        raise_all(self._problems(request, multirun=False))
        try:
            tree = self._tree(self._choices(request, multirun=False).lines)
            config = copy.deepcopy(tree.config)
            ConfigLoaderImpl._apply_overrides_to_config([item.override for item in request.values], config)
        except FAILURES as error:
            raise UserError([Problem("composition", _first_lines(error))]) from error
        return Tree(config, tree.is_multirun)

    def options(self, group: str) -> list[str]:
        """Names of a group's options that have files."""
        return self._groups.options(group)

    def given(self, overrides: Sequence[str]) -> frozenset[str]:
        """Keys that somebody set: by overrides, and by any file but that of the model's family itself."""
        request = self._request(overrides)
        chosen = self._choices(request, multirun=False)
        if chosen.lines not in self._written:
            own, known = (f"model/{chosen.family}", "model"), schema_of(chosen.family)
            files = [item for item in self._files(chosen.lines) if item != own]
            sources = _sources(self._loader, files)
            self._written[chosen.lines] = frozenset(key.key for s in sources for key in read(s, known))
        return self._written[chosen.lines] | {item.key for item in request.values}

    def _request(self, overrides: Sequence[str]) -> _Request:
        parsed = [self._parse(line) for line in overrides]
        everything = [item for items, _ in parsed for item in items]
        ours = [item for item in everything if not item.is_hydra]
        return _Request(
            hydra=tuple(item.line for item in everything if item.is_hydra),
            choices=tuple(item for item in ours if lines.is_choice(item, self._groups)),
            values=tuple(item for item in ours if not lines.is_choice(item, self._groups)),
            unparsed=tuple(problem for _, problems in parsed for problem in problems),
        )

    def _parse(self, line: str) -> tuple[list[Typed], list[Problem]]:
        if line not in self._parsed:
            self._parsed[line] = lines.parse(line, self._parser)
        return self._parsed[line]

    def _problems(self, request: _Request, multirun: bool) -> list[Problem]:
        chosen = self._choices(request, multirun)
        known = schema_of(chosen.family)
        values = [problem for item in request.values for problem in lines.check_value(item, known, multirun)]
        return [*request.unparsed, *chosen.wrong, *values, *chosen.wrong_files]

    def _choices(self, request: _Request, multirun: bool) -> _Choices:
        key = (*request.hydra, *(item.line for item in request.choices)), multirun
        if key not in self._chosen:
            good, wrong = lines.check_groups(request.choices, self._groups, multirun)
            files = self._files((*good, *request.hydra))
            family = _family_of(files)
            sources = _sources(self._loader, files)
            wrong_files = tuple(problem for source in sources for problem in self._file(source, family))
            self._chosen[key] = _Choices((*good, *request.hydra), family, tuple(wrong), wrong_files)
        return self._chosen[key]

    def _file(self, source: Source, family: str) -> list[Problem]:
        if (source, family) not in self._checked:
            self._checked[source, family] = check_file(source, schema_of(family))
        return self._checked[source, family]

    def _files(self, choices: tuple[str, ...]) -> list[tuple[str, str]]:
        """Path and package of each config of the defaults list, as far as the choices can be composed."""
        try:
            found = self._defaults_list(choices).defaults
        except FAILURES:
            return []
        return [(item.config_path, item.package or "") for item in found if item.config_path]

    def _defaults_list(self, choices: tuple[str, ...]) -> DefaultsList:
        """Hydra's, from files that are read once; it copies the lists in them before it resolves them."""
        if choices not in self._lists:
            self._lists[choices] = create_defaults_list(
                self._repository(choices),
                ROOT,
                self._overrides(choices),
                prepend_hydra=True,
                skip_missing=False,
            )
        return self._lists[choices]

    def _repository(self, choices: tuple[str, ...]) -> CachingConfigRepository:
        """Files as they were read; they depend on the choices only where these set `hydra.searchpath`."""
        hydra = tuple(line for line in choices if line.startswith("hydra."))
        if hydra not in self._repositories:
            _, self._repositories[hydra] = self._loader._parse_overrides_and_create_caching_repo(
                ROOT, list(hydra)
            )
        return self._repositories[hydra]

    def _overrides(self, choices: tuple[str, ...]) -> list[Override]:
        return [item.override for line in choices for item in self._parse(line)[0]]

    def _tree(self, choices: tuple[str, ...]) -> Tree:
        """What the choices compose to before any value is set, without Hydra's own part.

        As `load_configuration` makes it, which would list the defaults again. The repository is fresh, for
        merging changes what it read.
        """
        if choices not in self._trees:
            found = self._defaults_list(choices)
            _, repository = self._loader._parse_overrides_and_create_caching_repo(ROOT, list(choices))
            whole = self._loader._compose_config_from_defaults_list(found.defaults, repository)
            OmegaConf.set_struct(whole, True)
            ConfigLoaderImpl._apply_overrides_to_config(found.config_overrides, whole)
            is_multirun = whole.hydra.mode == RunMode.MULTIRUN
            with open_dict(whole):
                del whole["hydra"]
            self._trees[choices] = Tree(whole, is_multirun)
        return self._trees[choices]


def _first_lines(error: BaseException) -> str:
    """What Hydra says, and what OmegaConf said before it."""
    cause = f": {error.__cause__}" if error.__cause__ is not None else ""
    return f"{error}{cause}".strip()


def _family_of(files: list[tuple[str, str]]) -> str:
    """The family whose schema is in the defaults list; the first known one if the list cannot be made."""
    names = [path.rpartition("/")[2] for path, _ in files if path.startswith("schema/model/")]
    return names[-1] if names else next(iter(FAMILIES))


def _sources(loader: ConfigLoader, files: list[tuple[str, str]]) -> list[Source]:
    """The YAML files among the configs, each from the first folder of the search path that has it."""
    folders = [Path(source.path) for source in loader.get_sources() if source.scheme() == "file"]
    found = []
    for path, package in files:
        hits = (folder / f"{path}.yaml" for folder in folders if (folder / f"{path}.yaml").is_file())
        file = next(hits, None)
        if file is not None and not path.startswith("hydra/"):
            found.append(Source(file, package, is_site=path.startswith("site/")))
    return found
