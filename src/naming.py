"""Names of runs, sweeps and jobs: pure functions of config and overrides (RUN-1, RUN-4, SWEEP-9)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from src.config import Config
from src.digest import identity

MAX_BYTES = 96
"""Longest name of one directory (RUN-4)."""

_FORBIDDEN = re.compile(r"[^A-Za-z0-9._-]+")


def run_name(config: Config) -> str:
    """Directory of the run below `paths.runs`: `run_name`, in a sweep `<sweep>/<job>`, else derived (RUN-1).

    The derived name is `<experiment or model>-<mesh>-s<seed>-<identity[:8]>`.
    """
    if config.run_name is not None:
        return config.run_name
    if config.sweep.name is not None and config.sweep.job is not None:
        return f"{config.sweep.name}/{config.sweep.job}"
    stem = f"{composition(config)}-{config.mesh.spec}-s{config.seed}"
    return _fit(stem.replace("/", "-"), identity(config)[:8], always=True)


def composition(config: Config) -> str:
    """What the run is called after: its experiment, else its model."""
    return config.experiment or config.model.name


def sweep_name(config: Config, swept: Iterable[str]) -> str:
    """`sweep.name`, else `<model or experiment>-<hash8 of the sorted swept overrides>` (SWEEP-9).

    Args:
        config: any job of the sweep.
        swept: the swept overrides as typed, such as `seed=0,1,2`.
    """
    if config.sweep.name is not None:
        return config.sweep.name
    return _fit(composition(config).replace("/", "-"), _hash8("\n".join(sorted(swept))), always=True)


def job_name(swept: Iterable[str]) -> str:
    """The swept pairs of one job, `seed=0 mesh=pp2ep2` as `seed-0-mesh-pp2ep2` (SWEEP-9).

    A hash of the full text follows where characters had to go or the name was too long, so that two jobs
    which differ anywhere get two directories.
    """
    pairs = list(swept)
    plain = "-".join(pair.lstrip("+").replace("=", "-", 1) for pair in pairs)
    return _fit(plain, _hash8("\n".join(pairs)), always=False)


def key_of(override: str) -> str:
    """The key of an override, without `+`."""
    return override.lstrip("+").partition("=")[0]


def _fit(text: str, digest: str, always: bool) -> str:
    """`text` in the allowed characters and length, then the digest if asked for or if something was lost."""
    slug = _FORBIDDEN.sub("-", text).lstrip(".-") or "run"
    if not always and slug == text and len(slug) <= MAX_BYTES:
        return slug
    return f"{slug[: MAX_BYTES - 1 - len(digest)]}-{digest}"


def _hash8(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
