"""Lines of metrics.jsonl (LOG-1) and the summary of expert load."""

import json
import math
from pathlib import Path

import pytest
import torch

from src.trainer.metrics import append_lines, load_summary


def test_lines_are_strict_json_and_a_half_line_is_ended_first(tmp_path: Path) -> None:
    """LOG-1: non-finite numbers are text, floats round-trip; a kill in mid-write spoils one line only."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    append_lines(
        path,
        [{"step": 3, "loss": float("nan"), "x": [float("inf"), -math.inf]}, {"step": 4, "loss": 0.1 + 0.2}],
    )
    lines = path.read_text().splitlines()
    assert lines[1] == '{"step": 2, "lo'
    assert json.loads(lines[2]) == {"step": 3, "loss": "nan", "x": ["inf", "-inf"]}
    assert json.loads(lines[3])["loss"] == 0.1 + 0.2
    assert len(lines) == 4


def test_load_summary_of_even_collapsed_and_skewed_layers() -> None:
    """A collapsed router shows at once: entropy 0, max over mean E, dead experts counted."""
    counts = torch.tensor([[5, 5, 5, 5], [20, 0, 0, 0], [10, 5, 5, 0]])
    summary = load_summary(counts, [2, 4, 7])
    even, collapsed, skewed = (summary["layers"][k] for k in ("2", "4", "7"))
    assert even["entropy"] == pytest.approx(1.0)
    assert even["max_over_mean"] == pytest.approx(1.0)
    assert collapsed["entropy"] == pytest.approx(0.0, abs=1e-9)
    assert collapsed["max_over_mean"] == pytest.approx(4.0)
    assert collapsed["dead"] == 3
    assert skewed["entropy"] == pytest.approx(1.5 * math.log(2) / math.log(4))
    assert summary["load_max_over_mean"] == pytest.approx(4.0)
