"""Wrong changes of the code under which the pure tests fail: each names the test that notices."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from src.code_identity import CHECKOUT

MUTATIONS = [
    ("hostlist.py", ".zfill(len(low))", "", "test_host_lists"),
    ("hostlist.py", "int(high) < int(low)", "False", "test_wrong_host_lists"),
    ("spread.py", "if per_node == 0 or world % per_node or", "if", "test_contradictions_show_the_arithmetic"),
    ("flags.py", "math.ceil(", "int(", "test_flags_and_origins"),
    ("flags.py", "if name in ours:", "if False:", "test_extra_flags_that_contradict"),
    ("scheduler.py", "if seen is not None and seen.is_alive:", "if False:", "test_states"),
    ("scheduler.py", "if seen is not None and seen.state in STAND:", "if False:", "test_states"),
    ("scheduler.py", "waited >= UNKNOWN", "waited >= 0", "test_states"),
    ("scheduler.py", "os.environ.pop(name) for", "os.environ[name] for", "test_variables_of_an_outer_job"),
    ("submit.py", "PYTHONSAFEPATH=1", "", "test_script_and_submission"),
    ("submit.py", "shlex.quote(str(run)) for", "str(run) for", "test_odd_directories"),
    ("outcome.py", 'record["killed"] and code in ours', "False", "test_codes_of_nodes"),
    ("batch.py", "len(codes) < world", "False", "test_batch_side_settles"),
    ("batch.py", "newest_checkpoint(run) > before and", "", "test_requeue_needs"),
    ("batch.py", "and count < config.launcher.max_requeues", "", "test_requeue_needs"),
    ("remote.py", "if other is not None:", "if False:", "test_a_job_that_another_command"),
    ("remote_sweep.py", "for k in range(0, len(group), size)", "for k in [0]", "test_groups_of_a_sweep"),
    ("snapshot.py", "names | set(code.files)", "names", "test_snapshot"),
    ("places.py", 'preset.partition(".")[0] != first.partition(".")[0]', "False", "test_partial_places"),
    ("places.py", "if missing:", "if False:", "test_partial_places"),
    ("places.py", "place.tasks == place.nodes and", "", "test_roles"),
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
TESTS = ("tests/slurm/test_pure.py", "tests/spur/test_flags.py", "tests/spur/test_states.py")


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("name", sorted({mutation[0] for mutation in MUTATIONS}))
def test_mutations_are_noticed(name: str, tmp_path: Path) -> None:
    """Each mutation of one file makes its test fail."""
    for part in (
        "src",
        "conf",
        "hydra_plugins",
        "tests/slurm",
        "tests/launchers",
        "tests/spur",
        "tests/fakes",
    ):
        shutil.copytree(CHECKOUT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("train.py", "tests/__init__.py", "pyproject.toml"):
        shutil.copy(CHECKOUT / file, tmp_path / file)
    path = tmp_path / "src" / "launchers" / name
    original = path.read_text()
    for _, old, new, test in (mutation for mutation in MUTATIONS if mutation[0] == name):
        assert old in original, old
        path.write_text(original.replace(old, new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", *TESTS, "-k", test]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1, f"{old} -> {new}: {done.stdout[-2000:]}"
