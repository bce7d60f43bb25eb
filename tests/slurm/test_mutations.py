"""Wrong changes of the code under which the pure tests fail: each names the test that notices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launchers import mutate

MUTATIONS = [
    ("hostlist.py", ".zfill(len(low))", "", "test_host_lists"),
    ("hostlist.py", "int(high) < int(low)", "False", "test_wrong_host_lists"),
    ("spread.py", "if per_node == 0 or world % per_node or", "if", "test_contradictions_show_the_arithmetic"),
    ("flags.py", "math.ceil(", "int(", "test_flags_and_origins"),
    ("flags.py", "if name in ours and", "if False and", "test_extra_flags_that_contradict"),
    ("flags.py", "name not in BARE and ", "", "test_words_that_are_no_flags"),
    ("flags.py", "before is None or not before.is_typed or", "True or", "test_the_last_layer_of_a_flag"),
    ("ranks.py", 'trap "" TERM USR1 USR2; exec "$0"', 'exec "$0"', "test_script_and_submission"),
    ("scheduler.py", '"HELD" if HELD.search(row[2]) else row[1]', "row[1]", "test_squeue_lines"),
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
]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("name", sorted({mutation[0] for mutation in MUTATIONS}))
def test_mutations_are_noticed(name: str, tmp_path: Path) -> None:
    """Each mutation of one file makes its test fail."""
    mutate.check(name, MUTATIONS, "tests/slurm/test_pure.py", tmp_path)
