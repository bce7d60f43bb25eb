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

from src import reserved
from src.composer import FAILURES, ROOT, Composer, Tree
from src.config import Config
from src.digest import config_digest, flatten, identity
from src.errors import Problem, UserError
from src.machine import find_machine
from src.match import size_like
from src.models.schema import FAMILIES
from src.resolve import resolve
from src.tree import dump_config, load_config, raise_all, typed
from src.validate import validate

CONF = Path(__file__).resolve().parent.parent / "conf"
"""The config groups."""


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
        composer = Composer(loader)
        tree = composer.compose(overrides)
        return Composed(finish(_sized(tree, composer, overrides)), tree.is_multirun)


def compose_jobs(loader: ConfigLoader, jobs: Sequence[Sequence[str]]) -> list[Config]:
    """Compose and check every job of a sweep before any starts (SWEEP-1).

    Args:
        loader: Hydra's, as a launcher plugin gets it.
        jobs: the overrides of each job, with those that are not swept.

    Raises:
        UserError: with the problems of all jobs, each led by the job's overrides.
    """
    composer = Composer(loader)
    configs, problems = [], []
    for job in jobs:
        try:
            configs.append(finish(_sized(composer.compose(job), composer, job)))
        except UserError as error:
            problems += [
                Problem(f"[{' '.join(job)}] {p.key}", p.message, p.fix, p.rule) for p in error.problems
            ]
    raise_all(problems or _same_jobs(jobs) or _shared_names(configs))
    return configs


def _sized(tree: Tree, composer: Composer, overrides: Sequence[str]) -> Config:
    """The typed config; a model that follows another preset has its sizes."""
    config = typed(tree.config)
    size_like(config, composer, overrides)
    return config


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
        raise_all(Composer(loader).problems(overrides, multirun))


def finish(config: Config) -> Config:
    """Resolve and validate; raises `UserError` with every cross-group problem (CFG-2)."""
    raise_all(reserved.check(config))
    config = resolve(config, max(1, find_machine(config).devices))
    raise_all(validate(config))
    return config


__all__ = [
    "CONF",
    "FAILURES",
    "ROOT",
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
