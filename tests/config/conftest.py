"""One composed default run for all tests here, and the ways to ask what is wrong with another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from src.compose import compose
from src.config import Config
from src.errors import Problem, UserError

Problems = Callable[..., dict[str, Problem]]


@pytest.fixture(autouse=True)
def plain_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No site file and no split seed of the person who runs the tests; Hydra's global is left empty."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-site"))
    monkeypatch.delenv("MANYHEAD_SPLIT_SEED", raising=False)
    yield
    assert not GlobalHydra.instance().is_initialized()


@pytest.fixture(scope="session")
def _default() -> Config:
    return compose([]).config


@pytest.fixture
def base(_default: Config) -> Config:
    """The default run, composed once; a test may change its copy."""
    return copy.deepcopy(_default)


@pytest.fixture
def problems() -> Problems:
    """Key → problem of a refused composition; empty if it is accepted."""

    def ask(*overrides: str) -> dict[str, Problem]:
        try:
            compose(list(overrides))
        except UserError as error:
            found = error
        else:
            return {}
        assert found.code == 2
        return {problem.key: problem for problem in found.problems}

    return ask
