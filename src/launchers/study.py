"""An adaptive sweep: Optuna says what to try next, the launcher runs it, batch by batch (SWEEP-10).

The study lies in the sweep's directory, so that the same command goes on where it was stopped. Optuna
is imported here alone, and only when `hydra/sweeper=optuna` runs.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_loader import ConfigLoader
from hydra.utils import instantiate

from src.code_identity import code_record
from src.compose import compose_jobs
from src.config import Config
from src.digest import identity
from src.errors import Problem, UserError
from src.launchers.console import Console
from src.launchers.jobs import Job, make_jobs
from src.launchers.optuna_config import Settings
from src.launchers.search_space import Domain, Space, Value, read_space
from src.launchers.sweep import Batch
from src.launchers.sweep_end import objective
from src.report import show, table
from src.trainer.data.keys import data_key

if TYPE_CHECKING:
    import optuna

JOURNAL = "study.log"
"""Optuna's journal of the trials, in the sweep's directory: plain lines, which also an NFS keeps whole."""
FAILED = "failed {}"
"""Name under which the study keeps the exit code of a failed trial."""

Run = Callable[[Sequence[Sequence[str]], int], Batch]
"""Runs jobs with these overrides, the first of them at that place of the sweep."""


def run_study(loader: ConfigLoader, typed: Sequence[str], settings: Settings, run: Run) -> int:
    """Run trials until the study has `n_trials`; returns the sweep's exit code (EXIT-2).

    Args:
        loader: Hydra's, which composes the jobs.
        typed: the overrides of the command line; those of several values are searched.
        settings: of the sweeper.
        run: the launcher.

    Raises:
        UserError: the space, the objective or a trial's config is wrong (2), or Optuna is missing (3).
    """
    settings.check()
    lines = [*(f"{key}={value}" for key, value in settings.params.items()), *typed]
    space = read_space(lines)
    (config,) = compose_jobs(loader, [space.corner()])
    check_objective(config)
    (corner,) = make_jobs([config], [space.corner()], lines)
    assert corner.config.sweep.name is not None
    directory = Path(config.paths.runs) / corner.config.sweep.name
    name = settings.study_name or study_name(config, space, settings)
    study = open_study(settings, name, None if config.dry_run else directory)
    return Search(study, space, settings, config, run).search()


def check_objective(config: Config) -> None:
    """Raise `UserError` (2) where no trial could have a value."""
    key, problems = config.sweep.objective, []
    if key in ("heldout_loss", "bits_per_byte") and config.evaluation.name == "none":
        fix = "type sweep.objective=last_loss, or leave evaluation=none out"
        problems.append(Problem("sweep.objective", f"{key}, but evaluation=none", fix, "SWEEP-10"))
    if not config.launcher.wait:
        message = "false, but what is tried next depends on how a job ends"
        problems.append(Problem("launcher.wait", message, "leave it out", "SWEEP-10"))
    if problems:
        raise UserError(problems)


def study_name(config: Config, space: Space, settings: Settings) -> str:
    """A hash of all that makes values comparable: an edit of code, data or config begins another study."""
    parts = {
        "code": code_record().code_identity,
        "data": data_key(config),
        "config": identity(config),
        "space": {key: repr(domain) for key, domain in space.domains.items()},
        "objective": [config.sweep.objective, settings.direction],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def open_study(settings: Settings, name: str, directory: Path | None) -> optuna.Study:
    """The study of that name, made if there is none; in memory without a directory."""
    try:
        import optuna
    except ImportError as error:
        message = f"hydra/sweeper=optuna needs the package optuna ({error}): pip install -e '.[optuna]'"
        raise UserError(message, code=3) from error
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage: Any = settings.storage
    if directory is None:
        storage = None
    elif storage is None:
        directory.mkdir(parents=True, exist_ok=True)
        storage = JournalStorage(JournalFileBackend(str(directory / JOURNAL)))
    return optuna.create_study(storage=storage, study_name=name, direction=settings.way, load_if_exists=True)


@dataclass(frozen=True)
class Trial:
    """One that Optuna has asked for and not been told of."""

    number: int
    params: dict[str, Value]


class Search:
    """Trials on their way through the launcher."""

    def __init__(
        self, study: optuna.Study, space: Space, settings: Settings, config: Config, run: Run
    ) -> None:
        self._study, self._space, self._settings = study, space, settings
        self._config, self._run = config, run
        self._console = Console()

    def search(self) -> int:
        """Batch after batch; stops with the code of one that was stopped, or that failed under fail_fast."""
        if self._settings.sampler.get("seed") is None:
            self._console.line("the sampler has no seed: hydra.sweeper.sampler.seed=0 makes it repeatable")
        while batch := self._next():
            result = self._launch(batch)
            if self._config.dry_run:
                self._console.line("later trials depend on the results of these")
                return 0
            failed = any(job.state == "failed" for job in result.jobs)
            if self._is_stopped(result) or (failed and self._config.sweep.fail_fast):
                return result.code
        self._console.line("\n" + self._summary())
        return self._code()

    def _is_stopped(self, result: Batch) -> bool:
        return any(job.state in ("stopped", "cancelled") for job in result.jobs)

    def _next(self) -> list[Trial]:
        """Trials of an earlier command that were stopped come first, then new ones."""
        trials = self._study.get_trials(deepcopy=False)
        open_ones = [Trial(t.number, t.params) for t in trials if not t.state.is_finished()]
        batch = open_ones[: self._settings.n_jobs]
        for _ in range(min(self._settings.n_jobs - len(batch), self._settings.n_trials - len(trials))):
            batch.append(self._ask(len(trials) + len(batch) - len(open_ones)))
        return batch

    def _ask(self, number: int) -> Trial:
        """The next trial, drawn as a function of seed and number: a search that goes on is the same."""
        seed = self._settings.sampler.get("seed")
        self._study.sampler = instantiate(
            self._settings.sampler, **({} if seed is None else {"seed": seed_of(seed, number)})
        )
        distributions = {key: distribution(domain) for key, domain in self._space.domains.items()}
        asked = self._study.ask(distributions)
        return Trial(asked.number, asked.params)

    def _launch(self, batch: list[Trial]) -> Batch:
        """Run a batch and tell what came of it; equal trials are one job."""
        numbers: dict[tuple[str, ...], list[int]] = {}
        for trial in batch:
            numbers.setdefault(tuple(self._space.overrides(trial.params)), []).append(trial.number)
        try:
            result = self._run(list(numbers), batch[0].number)
        except UserError as error:
            for trial in batch:
                self._fail(trial.number, error.code)
            raise
        for job, equal in zip(result.jobs, numbers.values(), strict=True):
            for number in equal:
                self._tell(number, job)
        return result

    def _tell(self, number: int, job: Job) -> None:
        """A failed job is a failed trial; one that was stopped stays open and is gone on with."""
        value = objective(job)
        if math.isfinite(value):
            self._study.tell(number, value)
        elif job.state in ("done", "failed"):
            self._fail(number, job.code or 0)

    def _fail(self, number: int, code: int) -> None:
        from optuna.trial import TrialState

        self._study.set_user_attr(FAILED.format(number), code)
        self._study.tell(number, state=TrialState.FAIL)

    def _code(self) -> int:
        """That of the first failed trial of the whole study."""
        codes = self._study.user_attrs
        numbers = range(len(self._study.get_trials(deepcopy=False)))
        return next((code for n in numbers if (code := int(codes.get(FAILED.format(n), 0)))), 0)

    def _summary(self) -> str:
        """All trials, and the best of them."""
        trials = self._study.get_trials(deepcopy=False)
        keys = list(self._space.domains)
        cells = [
            [str(t.number), *(show(t.params[key]) for key in keys), t.state.name.lower(), show(t.value)]
            for t in trials
        ]
        text = table(["trial", *keys, "state", self._config.sweep.objective], cells)
        if all(t.value is None for t in trials):
            return f"{text}\nno trial has a value"
        best = self._study.best_trial
        pairs = " ".join(self._space.overrides(best.params)[len(self._space.fixed) :])
        return f"{text}\nbest       trial {best.number}: {show(best.value)} with {pairs}"


def seed_of(seed: int, number: int) -> int:
    """Seed of one trial's sampler; those of neighbours have nothing in common."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:4], "big")


def distribution(domain: Domain) -> optuna.distributions.BaseDistribution:
    """A domain as Optuna takes it."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if domain.choices:
        return CategoricalDistribution(domain.choices)
    if domain.is_whole:
        return IntDistribution(int(domain.low), int(domain.high), domain.log, int(domain.step or 1))
    return FloatDistribution(domain.low, domain.high, domain.log, domain.step)
