"""The kept loss curves are met again, on one rank and on four (golden)."""

from __future__ import annotations

import json

import pytest

from tests.distributed import world
from tests.golden.curve import STEPS, curves, path

LIMIT = 1e-9


@pytest.mark.parametrize(
    ("spec", "axes"), [("single", {}), pytest.param("pp2ep2", {"pp": 2, "ep": 2}, marks=pytest.mark.slow)]
)
def test_curves(spec: str, axes: dict[str, int]) -> None:
    """Loss, auxiliary value and norm of twelve steps in fp64 within 1e-9 of the files."""
    ranks = 1
    for size in axes.values():
        ranks *= size
    for batch, curve in world.run(ranks, curves, spec, axes)[0].items():
        kept = json.loads(path(batch).read_text())
        for key in ("loss", "aux", "norm"):
            assert len(kept[key]) == STEPS
            assert curve[key] == pytest.approx(kept[key], rel=LIMIT, abs=0), (
                f"{batch} {key}, kept by {kept['torch']}"
            )
