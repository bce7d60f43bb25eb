"""Wrong changes of environment, places, seats and searches, and the tests that notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launchers import mutate

MUTATIONS = [
    ("network.py", '"ACTIVE" in _text(port / "state") and ', "", "test_rows_of_a_network"),
    ("network.py", "int(port[0][len(name) :] or 0)", "port[0]", "test_rows_of_a_network"),
    ("network.py", "(?!.*bitmap)", "", "test_ainic_finds"),
    ("environment_rules.py", "if not ports and setting.meeting is not None:", "if False:", "without_ports"),
    ("environment_rules.py", "own or ports", "ports", "test_rows_of_a_network"),
    ("environment.py", '"torch" in modules', "False", "test_applied_before_torch"),
    ("environment.py", 'any(row.where == "launch" for row in rows_of(name))', "True", "test_nodes_share"),
    ("environment.py", 'row.kind == "secret"', "False", "test_paths_and_secrets"),
    ("places.py", "if rank >= nodes:", "if False:", "test_values_out_of_range"),
    ("places.py", "if port not in PORTS:", "if False:", "test_values_out_of_range"),
    (
        "places.py",
        '== world:\n        return "node"',
        '>= world:\n        return "node"',
        "test_ranks_of_pods",
    ),
    ("direct_store.py", 'if not (run / "control" / name).exists():', "if True:", "test_records_reach"),
    ("sweep.py", "if name not in taken", "", "test_jobs_side_by_side"),
    (
        "sweep.py",
        "if self._devices and len(self._free()) < job.config.mesh.world:",
        "if False:",
        "side_by_side",
    ),
    ("study.py", "if not t.state.is_finished()", "if False", "test_a_stopped_search"),
    ("study.py", "seed_of(seed, number)", "seed", "test_a_search_in_batches"),
    (
        "study.py",
        "numbers.setdefault(tuple(self._space.overrides(trial.params)), [])",
        "numbers.setdefault((str(trial.number),), [])",
        "test_equal_trials",
    ),
]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("name", sorted({mutation[0] for mutation in MUTATIONS}))
def test_mutations_are_noticed(name: str, tmp_path: Path) -> None:
    """Each mutation of one file makes its test fail."""
    mutate.check(name, MUTATIONS, "tests/launchers", tmp_path)
