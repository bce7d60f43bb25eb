"""Saved on one mesh, gone on with on another: bitwise taken over, and followed from there on (CKPT-2)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoint.continuing import (
    SAVED,
    STEPS,
    Outcome,
    Pair,
    Side,
    curve,
    path_of,
    train_loaders,
    train_savers,
    write_flat,
)
from tests.checkpoint.groups import mesh_of

MESHES = ("single", "ep2", "ep4", "pp2", "dp2", "rep2", "cp2", "pp2ep2")
"""Every ordered pair of them is tested; a new mesh is one word here."""
SCHEDULES = ("1f1b", "dualpipev")
"""Of the meshes with stages."""
UNEVEN = ("single", "ep2", "dp4", "pp2dp2")
"""With 6 experts: `dp4` puts them on four shards (ENG-2)."""
LOSS_LIMIT = 1e-12
LIMITS = {"sgd": 1e-11, "adamw": 1e-9}
"""Relative, in fp64; T-2's, but where AdamW divides a gradient that is next to nothing by its own size."""


def sides() -> list[Side]:
    """The meshes, those with stages under each schedule."""
    return [
        Side(spec, schedule)
        for spec in MESHES
        for schedule in (SCHEDULES if mesh_of(spec).pp > 1 else SCHEDULES[:1])
    ]


def all_pairs() -> list[Pair]:
    """Every ordered pair of sides whose models are the same."""
    uneven = [Side(spec, experts=6) for spec in UNEVEN]
    return [Pair(*pair, "adamw") for some in (sides(), uneven) for pair in itertools.permutations(some, 2)]


def ring(some: Sequence[Side]) -> list[Pair]:
    """Each side saves once and goes on once; the first pair also without a part of its state."""
    pairs = [Pair(a, b, "sgd") for a, b in zip(some, [*some[1:], some[0]], strict=True)]
    return [*pairs, *(replace(pairs[0], forgets=part) for part in ("moments", "shares"))]


def go_through(root: Path, pairs: Sequence[Pair]) -> list[dict[str, Outcome]]:
    """Save and go on; the outcomes by rank of the world."""
    savers = {f"{pair.optimizer}.{pair.saver}": (pair.saver, pair.optimizer) for pair in pairs}
    train_savers(root, savers, timeout=280)
    write_flat(root, savers.values())
    return train_loaders(root, {str(pair): pair for pair in pairs}, timeout=280)


def check(root: Path, pairs: Sequence[Pair]) -> None:
    """Everything is taken over to the bit, and followed within the limits; what was forgotten is noticed."""
    found = go_through(root, pairs)
    for pair in pairs:
        outcomes = [results[str(pair)] for results in found if str(pair) in results]
        assert len(outcomes) == mesh_of(pair.loader.spec).world
        expected, worst = curve(path_of(root, pair.optimizer, pair.saver)), max(o.worst for o in outcomes)
        if pair.forgets:
            assert worst > 100 * LIMITS[pair.optimizer], (pair, worst)
            continue
        assert [name for outcome in outcomes for name in outcome.wrong] == [], pair
        assert worst < LIMITS[pair.optimizer] / 2, (pair, worst)
        assert len(expected) == 3 * (STEPS - SAVED)
        assert curve(root / str(pair)) == pytest.approx(expected, rel=LOSS_LIMIT), pair


@pytest.mark.slow
@pytest.mark.parametrize("stride", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_each_mesh_goes_on_with_another_ones_run_ckpt_2(tmp_path: Path, stride: int) -> None:
    """CKPT-2: parameters, moments, lagged shares bitwise after loading; loss and all of them follow with SGD.

    Every second mesh, or every one, with each schedule saves once and goes on once. Mutations: moments or
    shares that start anew show.
    """
    check(tmp_path, ring(sides()[::stride]))


@pytest.mark.slow
@pytest.mark.soak
def test_any_mesh_goes_on_with_any_run_ckpt_2(tmp_path: Path) -> None:
    """CKPT-2: with AdamW all ordered pairs, across schedules, and 6 experts on 4 shards."""
    check(tmp_path, all_pairs())
