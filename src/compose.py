"""From overrides to checked configs, for one run or all jobs of a sweep (CFG-1, CFG-2, SWEEP-1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from src import overrides as lines
from src import reserved
from src.conf_files import Source, check_file
from src.config import Config
from src.digest import config_digest, flatten, identity
from src.errors import Problem, UserError
from src.fields import schema_of
from src.machine import find_machine
from src.models.schema import FAMILIES
from src.resolve import resolve
from src.tree import dump_config, load_config, raise_all, typed
from src.validate import validate

CONF = Path(__file__).resolve().parent.parent / "conf"
"""The config groups."""

FAILURES = (HydraException, OmegaConfBaseException, YAMLError)
"""What Hydra raises where a config cannot be composed; a file that is no YAML comes through as it is."""

ROOT = "train"
"""The config that `train.py` composes."""


@dataclass(frozen=True)
class Composed:
    """A run that can be started, and what Hydra says about starting it."""

    config: Config
    is_multirun: bool
    """Whether a group set Hydra's mode to MULTIRUN."""


def register() -> None:
    """Put the schema where Hydra finds it: the root, and each family in the group `schema/model` (CFG-9)."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config, provider="manyhead")
    for name, family in FAMILIES.items():
        store.store(group="schema/model", name=name, node=family, provider="manyhead")


@contextmanager
def config_loader() -> Iterator[ConfigLoader]:
    """Hydra's loader over `conf/`, the schema, the mesh specs and the site file."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def compose(overrides: Sequence[str]) -> Composed:
    """Compose, check and resolve one run; raises `UserError` with every problem at once."""
    with config_loader() as loader:
        return _compose(loader, overrides, {})


def compose_jobs(loader: ConfigLoader, jobs: Sequence[Sequence[str]]) -> list[Config]:
    """Compose and check every job of a sweep before any starts (SWEEP-1).

    Args:
        loader: Hydra's, as a launcher plugin gets it.
        jobs: the overrides of each job, with those that are not swept.

    Raises:
        UserError: with the problems of all jobs, each led by the job's overrides.
    """
    configs, problems = [], []
    seen: dict[Source, list[Problem]] = {}
    for job in jobs:
        try:
            configs.append(_compose(loader, job, seen).config)
        except UserError as error:
            problems += [
                Problem(f"[{' '.join(job)}] {p.key}", p.message, p.fix, p.rule) for p in error.problems
            ]
    raise_all(problems or _same_jobs(jobs) or _shared_names(configs))
    return configs


def _same_jobs(jobs: Sequence[Sequence[str]]) -> list[Problem]:
    """A value that is listed twice: two jobs would train the same run in one directory."""
    words = [" ".join(job) for job in jobs]
    fix = "list each value once"
    twice = [text for text in dict.fromkeys(words) if words.count(text) > 1]
    return [Problem(f"[{text}]", "is in the sweep more than once", fix, "SWEEP-1") for text in twice]


def _shared_names(configs: Sequence[Config]) -> list[Problem]:
    """A `run_name` that two jobs of a sweep have: they would train in one directory."""
    names = [config.run_name for config in configs if config.run_name is not None]
    message = "two jobs of the sweep would share the directory {}"
    fix = "leave run_name out: sweep.name=NAME names the sweep, and each job has a name of its own"
    twice = sorted({name for name in names if names.count(name) > 1})
    return [Problem("run_name", message.format(name), fix, "RUN-5") for name in twice]


def check_overrides(overrides: Sequence[str], multirun: bool) -> None:
    """Raise `UserError` with everything wrong with the overrides alone, each value of a sweep included."""
    with config_loader() as loader:
        raise_all(_Request(loader, overrides, multirun).problems())


def finish(config: Config) -> Config:
    """Resolve and validate; raises `UserError` with every cross-group problem (CFG-2)."""
    raise_all(reserved.check(config))
    config = resolve(config, max(1, find_machine(config).devices))
    raise_all(validate(config))
    return config


class _Request:
    """Overrides on their way to a tree: what each is, and what is wrong with it."""

    def __init__(self, loader: ConfigLoader, overrides: Sequence[str], multirun: bool) -> None:
        self.loader, self.multirun = loader, multirun
        everything, self.unparsed = lines.parse(overrides)
        self.hydra = [item.line for item in everything if item.is_hydra]
        groups = lines.Groups(loader)
        ours = [item for item in everything if not item.is_hydra]
        choices = [item for item in ours if lines.is_choice(item, groups)]
        self.values = [item for item in ours if item not in choices]
        self.choices, self.bad_choices = lines.check_groups(choices, groups, multirun)

    def problems(self, seen: dict[Source, list[Problem]] | None = None) -> list[Problem]:
        """All problems; files are read again unless `seen` remembers them."""
        files = self._files()
        known = schema_of(_family_of(files))
        problems = [*self.unparsed, *self.bad_choices]
        for item in self.values:
            problems += lines.check_value(item, known, self.multirun)
        for source in _sources(self.loader, files):
            seen = {} if seen is None else seen
            if source not in seen:
                seen[source] = check_file(source, known)
            problems += seen[source]
        return problems

    def _files(self) -> list[tuple[str, str]]:
        """Path and package of each config of the defaults list, as far as the choices can be composed."""
        try:
            found = self.loader.compute_defaults_list(ROOT, [*self.choices, *self.hydra], RunMode.RUN)
        except FAILURES:
            return []
        return [(item.config_path, item.package or "") for item in found.defaults if item.config_path]


def _compose(loader: ConfigLoader, overrides: Sequence[str], seen: dict[Source, list[Problem]]) -> Composed:
    raise_all(_Request(loader, overrides, multirun=False).problems(seen))
    try:
        tree = loader.load_configuration(ROOT, list(overrides), RunMode.RUN, from_shell=False)
    except FAILURES as error:
        raise UserError([Problem("composition", _first_lines(error))]) from error
    return Composed(finish(typed(tree)), tree.hydra.mode == RunMode.MULTIRUN)


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


__all__ = [
    "Composed",
    "check_overrides",
    "compose",
    "compose_jobs",
    "config_digest",
    "config_loader",
    "dump_config",
    "finish",
    "flatten",
    "identity",
    "load_config",
    "register",
    "resolve",
    "typed",
]
