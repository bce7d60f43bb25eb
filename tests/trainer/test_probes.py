"""The learning probes tell live attention and live experts from dead ones, on the composed experiments."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from src.compose import compose
from src.models.decoder_layer import DecoderLayer, MoE
from src.models.deepseek_v2 import LatentAttention
from tests.trainer.small import lines, run_here


def dead_attention() -> AbstractContextManager[Any]:
    """Attention adds nothing."""
    forward = LatentAttention.forward
    return mock.patch.object(LatentAttention, "forward", lambda *arguments: forward(*arguments) * 0)


def dead_experts() -> AbstractContextManager[Any]:
    """Routed experts give nothing; dense layers and shared experts stay."""
    experts = DecoderLayer.experts

    def dead(layer: DecoderLayer, rows_RD: Tensor, counts_E: Tensor | None) -> Tensor:
        out_RD = experts(layer, rows_RD, counts_E)
        return out_RD * 0 if isinstance(layer.mlp, MoE) else out_RD

    return mock.patch.object(DecoderLayer, "experts", dead)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("probe", "patch", "steps", "least", "most"),
    [
        pytest.param("probe_copy", nullcontext, None, 0.0, 0.1, marks=pytest.mark.soak),
        pytest.param("probe_copy", dead_attention, 60, 3.0, 5.0, marks=pytest.mark.soak),
        ("probe_rules", nullcontext, None, 0.0, 1.0),
        ("probe_rules", dead_experts, None, 1.0, 5.0),
    ],
    ids=["copy", "copy with attention dead", "rules", "rules with experts dead"],
)
def test_probes(tmp_path: Path, probe: str, patch: Any, steps: int | None, least: float, most: float) -> None:
    """Held-out nats after the experiment as it is, and with the part that it is there for dead."""
    overrides = [f"experiment={probe}", f"paths.runs={tmp_path}/runs", f"paths.data={tmp_path}/data"]
    with patch():
        config = compose(overrides + ([f"max_steps={steps}"] if steps else [])).config
        run_here(config, tmp_path / "run")
    assert least < lines(tmp_path / "run", "evaluation.jsonl")[-1]["loss"] < most
