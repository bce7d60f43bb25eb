"""Which rank failed first, from error records and return codes (AGENT-4, EXIT-1)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from src.launchers.outcome import exit_code, first_failure

PEER = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:34512"


def record(rank: int, time: float, message: str, code: int = 1, kind: str = "RuntimeError") -> dict[str, Any]:
    return {"rank": rank, "time": time, "type": kind, "message": message, "code": code, "traceback": "tb"}


@pytest.mark.parametrize(
    ("records", "codes", "killed", "rank", "code", "signal"),
    [
        pytest.param([], {1: 42, 0: -15}, False, 1, 42, None, id="a code without a record"),
        pytest.param([], {0: -15, 1: -9}, False, 1, 137, 9, id="killed from outside; the agent ended rank 0"),
        pytest.param([record(0, 5.0, PEER)], {0: 1, 1: -9}, False, 1, 137, 9, id="a peer's record yields"),
        pytest.param(
            [record(0, 5.0, PEER), record(1, 5.4, "bad")], {0: 1, 1: 1}, False, 1, 1, None, id="late cause"
        ),
        pytest.param(
            [record(0, 5.0, PEER), record(1, 15.1, "x")], {0: 1, 1: 1}, False, 0, 1, None, id="too late"
        ),
        pytest.param(
            [record(2, 9.0, "a", 7), record(1, 8.0, "b", 4)], {1: 4, 2: 7}, False, 1, 4, None, id="earliest"
        ),
        pytest.param([record(1, 5.0, "bad", 7)], {1: 7, 0: -9}, True, 1, 7, None, id="we killed rank 0"),
        pytest.param(
            [record(1, 5.0, "bad", 7)], {1: 7, 0: -6}, False, 1, 7, None, id="a cause before an abort"
        ),
        pytest.param([], {0: -9, 1: -9}, True, 0, 137, 9, id="all killed by us"),
    ],
)
def test_first_failure(
    tmp_path: Path,
    records: list[dict[str, Any]],
    codes: dict[int, int],
    killed: bool,
    rank: int,
    code: int,
    signal: int,
) -> None:
    """AGENT-4: the earliest cause; "closed by peer" yields to another within 10 s, and to a silent death."""
    for one in records:
        (tmp_path / f"error.{one['rank']}.json").write_text(json.dumps(one))
    failure = first_failure(tmp_path, codes, killed)
    assert failure is not None
    assert (failure.rank, failure.code, failure.signal) == (rank, code, signal)


def test_all_well_is_no_failure(tmp_path: Path) -> None:
    """A record left by a rank that ended with 0 is no failure."""
    (tmp_path / "error.0.json").write_text(json.dumps(record(0, 1.0, "late thread")))
    assert first_failure(tmp_path, {0: 0, 1: 0}) is None


def test_codes() -> None:
    """EXIT: a code stays, a signal n is 128 + n."""
    assert [exit_code(code) for code in (0, 42, 75, -9, -15)] == [0, 42, 75, 137, 143]
