"""Names of runs, sweeps and jobs (RUN-1, RUN-4, SWEEP-9)."""

from __future__ import annotations

import copy
import re

import pytest

from src.config import Config
from src.digest import identity
from src.naming import MAX_BYTES, job_name, run_name, sweep_name
from src.validate import validate


def test_default_name_is_a_function_of_the_config(base: Config) -> None:
    """RUN-1: model or experiment, mesh, seed, identity; where a run goes and how it starts do not enter."""
    assert run_name(base) == f"deepseek_v2-single-s0-{identity(base)[:8]}"
    other = copy.deepcopy(base)
    other.paths.runs, other.logger.kinds, other.resume, other.dry_run = "/elsewhere", ["wandb"], "none", True
    assert run_name(other) == run_name(base)
    other.model.name, other.experiment, other.seed, other.mesh.spec = "deepseek_v2/lite", None, 3, "pp2ep2"
    assert run_name(other) == f"deepseek_v2-lite-pp2ep2-s3-{identity(other)[:8]}"
    other.experiment = "x" * 200
    assert len(run_name(other)) == MAX_BYTES
    assert run_name(other).endswith(identity(other)[:8])


def test_names_in_a_sweep(base: Config) -> None:
    """SWEEP-9: swept pairs name the job; the sorted swept overrides, hashed, the sweep."""
    assert job_name(["seed=0", "mesh=pp2ep2"]) == "seed-0-mesh-pp2ep2"
    first, second = (
        sweep_name(base, ["seed=0,1", "mesh=ep2,pp2"]),
        sweep_name(base, ["mesh=ep2,pp2", "seed=0,1"]),
    )
    assert first == second != sweep_name(base, ["seed=0,2", "mesh=ep2,pp2"])
    assert re.fullmatch(r"deepseek_v2-[0-9a-f]{8}", first)
    base.sweep.name, base.sweep.job = "night", "seed-0"
    assert sweep_name(base, ["seed=0,1"]) == "night"
    assert run_name(base) == "night/seed-0"
    base.run_name = "mine"
    assert run_name(base) == "mine"


@pytest.mark.parametrize(
    "pairs",
    [
        ["resume=a b;c"], ["data.files=[a,b]"], ["x=" + "y" * 300], ["model=deepseek_v2/lite"],
        ["a=é"], ["+env.A='$x'"],
    ],
)  # fmt: skip
def test_names_paste_unquoted(pairs: list[str]) -> None:
    """RUN-4: plain characters, at most 96 bytes."""
    name = job_name(pairs)
    assert re.fullmatch(r"[A-Za-z0-9._][A-Za-z0-9._-]*", name)
    assert len(name.encode()) <= MAX_BYTES


def test_names_differ_where_overrides_do() -> None:
    """RUN-4: equal in the first 300 characters, or after the slug, and still two directories."""
    long = "data.path=" + "x" * 300
    assert job_name([long + "1"]) != job_name([long + "2"])
    assert job_name(["p=a/b"]) != job_name(["p=a b"]) != job_name(["p=a-b"])


@pytest.mark.parametrize("name", ["a b", "", "../x", "a/../b", "-rf", "é", "x" * 97, "a//b", "/abs", "$HOME"])
def test_explicit_names_are_held_to_the_same(base: Config, name: str) -> None:
    """RUN-4: a name that would not paste is refused."""
    base.run_name = name
    assert [problem.key for problem in validate(base)] == ["run_name"]


@pytest.mark.parametrize("name", ["a", "007", "night/seed-0", "a.b_c-d", "x" * 96])
def test_plain_names_pass(base: Config, name: str) -> None:
    """RUN-4: plain ones are not."""
    base.run_name = name
    assert validate(base) == []
