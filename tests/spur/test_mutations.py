"""Wrong changes of what Spur needs, under which its quick tests fail: each names the test that notices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launchers import mutate

MUTATIONS = [
    ("node.py", "if attempts(run) == attempt:", "if True:", "test_record_of_an_agent"),
    ("places.py", 'if "SPUR_JOB_ID" in shell and', "if False and", "test_places_in_a_step_of_spur"),
    ("beats.py", "seconds > limit and who not in ended", "seconds > limit", "test_silence_is_told"),
    ("beats.py", "if attempts(self._run) != self._attempt:", "if False:", "test_node_ends_when_another"),
    ("batch.py", 'config.launcher.name == "spur" and is_told', "is_told", "test_codes_of_spur"),
    ("spur.py", "if number.isdecimal()}", "}", "test_looking_at_the_queue"),
    ("spur.py", "line.state in COMES_BACK", "False", "test_looking_at_the_queue"),
    ("spur.py", 'if "requeuehold" in', 'if "requeue" in', "test_requeue_of_old"),
    ("spur.py", "or not number.isdecimal()", "", "test_submission_is_refused_with"),
    ("spur_batch.py", 'was_running and state == "queued"', 'state == "queued"', "test_other_nodes_hold"),
    ("spur_capabilities.py", 'record["stamp"] == stamp()', "True", "test_probe_is_kept"),
    ("spur_flags.py", '"mem": (MEMORY', '"memory": (MEMORY', "test_memory_that_spur_does_not_read"),
    ("spur_flags.py", "value and SECRET.search(name)", "False", "test_exports"),
    (
        "spur_flags.py",
        "problems += _wrong_exports(config)",
        "problems = _wrong_exports(config)",
        "all_at_once",
    ),
    ("spur_script.py", 'f"srun -N', "f\"'srun' -N", "test_script_runs_once"),
    ("spur_script.py", "run={shlex.quote(str(run))}", "run={run}", "test_odd_directories_reach_the_agent"),
    (
        "spur_script.py",
        "_threads(name, shell.get(name))",
        "_threads(name, None)",
        "test_script_keeps_the_threads",
    ),
]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("name", sorted({mutation[0] for mutation in MUTATIONS}))
def test_mutations_are_noticed(name: str, tmp_path: Path) -> None:
    """Each mutation of one file makes its test fail."""
    mutate.check(name, MUTATIONS, "tests/spur", tmp_path)
