"""PROF-1, PROF-2: `layer.stage.direction` in the trace of a window, and nothing outside of it."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from src.config import PipelineConfig, ProfileConfig, RecomputeConfig
from src.trainer.ranges import Ranges
from tests.models.odd import deepseek_v2
from tests.models.test_recompiles import Graphs, step
from tests.models.tools import make
from tests.trainer.small import run_here, small_config

LAYERS = {f"{index}.layer.{way}" for index in range(3) for way in ("forward", "backward")}
STAGES = {
    f"{index}.{stage}.{way}"
    for index in range(3)
    for stage in ("attend", "dispatch", "experts")
    for way in ("forward", "backward")
    if index > 0 or stage in ("attend", "experts")  # The first is dense; no rows return.
}
ENDS = {f"stage0.{end}.{way}" for end in ("enter", "leave") for way in ("forward", "backward")}


def ranges_of(root: Path, **changes: Any) -> list[dict[str, Any]]:
    """Those of layers and stages in the trace of step 3 of 4, where each step has three micro-batches."""
    config = small_config(root, profile=ProfileConfig(steps=[3, 3]), max_steps=4, **changes)
    config.checkpoint.final = False
    run_here(config, root / "run")
    text = gzip.decompress((root / "run" / "profile" / "rank_00000.trace.json.gz").read_bytes())
    events = [e for e in json.loads(text)["traceEvents"] if e.get("cat") == "user_annotation"]
    return [e for e in events if e["name"].endswith((".forward", ".backward"))]


CASES = [
    ("plain", "none", LAYERS),
    ("staged", "none", STAGES | {"stage0.leave.forward", "stage0.leave.backward"}),
    pytest.param("auto", "full", LAYERS | ENDS, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("program", "recompute", "names"), CASES)
def test_prof_1_layers_and_stages_are_named(
    tmp_path: Path, program: str, recompute: str, names: set[str]
) -> None:
    """Each once a micro-batch; those of the backward pass do not lie in one another."""
    options = {"pipeline": PipelineConfig(program=program), "recompute": RecomputeConfig(recompute)}
    found = ranges_of(tmp_path, **options)
    assert {e["name"] for e in found} == names
    assert all(sum(e["name"] == name for e in found) == 3 for name in names)
    back = sorted((e["ts"], e["ts"] + e["dur"]) for e in found if e["name"].endswith(".backward"))
    assert all(end <= start for (_, end), (start, _) in pairwise(back))


@pytest.mark.slow
def test_prof_2_ranges_bring_no_graph() -> None:
    """Layers that are compiled stay the graphs they were, with ranges around them and without."""
    torch.compiler.reset()
    model, dispatcher = make(deepseek_v2(num_layers=2), kernels="auto")
    for layer in model.model.layers.values():
        layer.compile(fullgraph=True, dynamic=False, backend=Graphs())
    for seed in range(2):
        step(model, dispatcher, seed)
    with torch.compiler.set_stance("fail_on_recompile"):
        for around in (Ranges(torch.device("cpu")).around(0), None):
            model.around = around
            step(model, dispatcher, 2)
