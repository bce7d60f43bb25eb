"""`train.py` as a person runs it: help, refusals, dry runs, flags, exit codes (HELP-1, LOG-6, CFG-18)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from src.command_line import main
from src.config import Config
from src.help import group_sentences, help_text, options

CHECKOUT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "datasets", "wandb", "matplotlib", "tokenizers", "transformers", "tensorboard")

PROBE = f"""
import sys, time
started = time.monotonic()
from src.command_line import main
codes = []
def run(*words):
    begin = time.monotonic()
    try:
        codes.append(main(words))
    except SystemExit as stop:
        codes.append(stop.code)
    print("took", time.monotonic() - begin, file=sys.stderr)
run("--help")
run("sead=3", "model.hiden_size=64")
run("model=deepseek_v2", "mesh=pp3ep5")
run("dry_run=true", "mesh=pp2ep2", "data=synthetic")
run("-m", "seed=0,x", "mesh=pp2,zz")
run("backend=megatron", "launcher=slurm", "pipeline=zbv")
import src.compose, src.validate, src.launchers.plan, src.launchers.launch
print("codes", codes, "heavy", [name for name in {HEAVY!r} if name in sys.modules])
"""


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    """CFG-18: help, composition, validation, planning and refusals, in one process without torch."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(CHECKOUT), "HOME": str(tmp_path)}
    answer = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert answer.stdout.splitlines()[-1] == "codes [0, 2, 2, 0, 2, 2] heavy []", answer.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_is_quick_and_whole(tmp_path: Path) -> None:
    """CFG-2, CFG-18, LOG-6: both typos with their nearest keys, exit 2, a first line at once, in under 1.5 s
    (of CPU time here, for a busy machine may take longer)."""
    command = [sys.executable, str(CHECKOUT / "train.py"), "sead=3", "model.hiden_size=64"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("manyhead")
        _, said = process.communicate()
    assert process.returncode == 2
    assert "did you mean seed?" in said
    assert "did you mean model.hidden_size?" in said
    assert "Traceback" not in said
    assert cpu_seconds(command, tmp_path) < 1.5
    assert list(tmp_path.iterdir()) == []


def cpu_seconds(command: list[str], folder: Path) -> float:
    """CPU time of a command."""
    import resource

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help() -> None:
    """HELP-1: six commands, each group with its sentence and every option, where to read on."""
    text = help_text()
    assert text.count("  python train.py") == 6
    for group, sentence in group_sentences().items():
        assert sentence.split()[0] in text
        for option in options(group):
            assert option in text
    assert "conf/README.md" in text
    assert "src/config.py" in text
    for path in ("conf/README.md", "src/config.py"):
        assert (CHECKOUT / path).is_file()
    assert max(len(line) for line in text.splitlines()) <= 110


def test_every_key_has_a_sentence() -> None:
    """DOC-3: the string under each field of the schema."""
    from src.fields import schema_of
    from src.help import field_sentences

    sentences: dict[str, str] = {}
    for file in ("src/config.py", "src/config_compute.py", "src/config_launch.py", "src/models/schema.py"):
        source = (CHECKOUT / file).read_text()
        for line in source.splitlines():
            if line.startswith("class "):
                sentences |= field_sentences(source, line.split()[1].split("(")[0].rstrip(":"))
    assert {key.rpartition(".")[2] for key in schema_of("deepseek_v2").leaves} <= set(sentences)


def test_a_dry_run_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CFG-17: exit 0, text and one JSON object; no file, no child, no socket."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", _forbidden)
    monkeypatch.setattr("socket.socket.connect", _forbidden)
    assert main(["dry_run=true", "mesh=pp2ep2", "run_name=mine"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert plan["world"] == 4
    assert plan["run_directory"] == f"{tmp_path}/runs/mine"
    assert plan["overrides"] == ["dry_run=true", "mesh=pp2ep2", "run_name=mine"]
    assert list(tmp_path.iterdir()) == []


def _forbidden(*args: object, **kwargs: object) -> None:
    raise AssertionError(f"touched: {args}")


def pipe(words: str, folder: Path) -> tuple[int, str]:
    """Exit code of `train.py` in a shell line, and what it said on stderr."""
    line = f"{sys.executable} {CHECKOUT}/train.py {words}; exit ${{PIPESTATUS[0]}}"
    answer = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True)
    return answer.returncode, answer.stderr


def test_a_reader_who_goes_away_is_no_error(tmp_path: Path) -> None:
    """CFG-17, HELP-1: into `head`, into a closed stdout: the code stays; a full disk is told."""
    assert pipe("dry_run=true data=synthetic | true", tmp_path) == (0, "")
    assert pipe("--help | true", tmp_path) == (0, "")
    assert pipe("sead=1 >&- 2>&-", tmp_path) == (2, "")
    assert pipe("dry_run=true data=synthetic >&-", tmp_path) == (0, "")
    code, said = pipe("dry_run=true data=synthetic > /dev/full", tmp_path)
    assert (code, said) == (1, "refused: stdout cannot be written: No space left on device\n")
    assert list(tmp_path.iterdir()) == []


def test_seeds_share_data_and_splits_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SEED-2: `-m seed=0,1,2` is one data key, `-m data.split_seed=1,2` are two."""
    monkeypatch.chdir(tmp_path)

    def keys(swept: str) -> list[str]:
        files = f"data.files=['{CHECKOUT}/docs/*.md']"
        assert main(["-m", "data=text_files", files, swept, "dry_run=true"]) == 0
        plans = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
        return [plan["data_key"] for plan in plans]

    seeds, splits = keys("seed=0,1,2"), keys("data.split_seed=1,2")
    assert (len(seeds), len(set(seeds)), None in seeds) == (3, 1, False)
    assert (len(splits), len(set(splits))) == (2, 2)


def test_a_site_file_that_is_no_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CFG-11, CFG-2: exit 2 with file and line, no traceback; of a run and of a sweep."""
    site = tmp_path / "manyhead" / "site" / "default.yaml"
    site.parent.mkdir(parents=True)
    site.write_text("logger: [\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for words in (["data=synthetic"], ["-m", "data=synthetic", "seed=0,1"]):
        assert main(words) == 2
        assert f'"{site}", line 2' in capsys.readouterr().err


def test_a_value_listed_twice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SWEEP-1: two equal jobs would meet in one directory, so the sweep does not start."""
    monkeypatch.chdir(tmp_path)
    assert main(["-m", "data=synthetic", "seed=0,1,0"]) == 2
    assert "[data=synthetic seed=0]: is in the sweep more than once" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_flags_may_stand_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """HYD-9, HYD-18: `-m` between overrides; jobs are planned in order and Hydra's directory is gone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert main(["data=synthetic", "-m", "seed=3,4", "dry_run=true"]) == 0
    plans = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [plan["run_directory"].rpartition("/")[2] for plan in plans] == ["seed-3", "seed-4"]
    assert len({plan["data_key"] for plan in plans}) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_is_refused_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SWEEP-1: one bad item refuses the sweep and is named; nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    assert main(["-m", "seed=0,1", "mesh=single,ep5", "data=synthetic"]) == 2
    said = capsys.readouterr().err
    for seed in (0, 1):
        assert f"[seed={seed} mesh=ep5 data=synthetic] mesh.ep" in said
    assert "mesh=single" not in said
    assert main(["-m", "seed=0,1", "run_name=mine", "data=synthetic"]) == 2
    assert "would share the directory mine" in capsys.readouterr().err
    assert main(["-m", "seed=0,1", "hydra/launcher=basic", "data=synthetic"]) == 2
    assert "SWEEP-7" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["--config-name", "x"],
        ["--config-path=runs"],
        ["--experimental-rerun", "x"],
        ["--no-such-flag"],
    ],
)
def test_other_flags_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """HYD-16, HYD-17: no way past the schema; argparse's errors are exit 2."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2


def test_the_config_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """CFG-16: `--cfg job --resolve` prints the composed config, and refuses typos like a run."""
    assert main(["--cfg", "job", "--resolve", "mesh=pp2", "seed=5"]) == 0
    shown = capsys.readouterr().out
    assert "seed: 5" in shown
    assert "pp: 2" in shown
    assert main(["--cfg", "job", "sead=5"]) == 2
    assert main(["-m", "--cfg", "job", "seed=1,2"]) == 2
    assert "do not go together" in capsys.readouterr().err


def test_what_does_not_fit_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PROJ-2, CFG-17: exit 3 with the arithmetic, nothing written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("src.machine._memory", lambda root: (8 * 2**30, "a test"))
    assert main(["model=deepseek_v2/lite", "mesh=pp2ep2", "platform=cpu"]) == 3
    said = capsys.readouterr().err
    assert "weights 58.5 GiB + gradients 58.5 GiB + optimizer 117 GiB" in said
    assert "of 8.0 GiB, a test" in said
    assert list(tmp_path.iterdir()) == []


def test_defaults_of_the_spec(base: Config) -> None:
    """KEY-1 to KEY-3: names and defaults that pages and tests rely on."""
    assert (base.seed, base.sequence_length, base.global_batch_size, base.micro_batch_size) == (0, 256, 16, 2)
    assert (base.run_name, base.resume, base.init_from, base.dry_run, base.env) == (
        None,
        "auto",
        None,
        False,
        {},
    )
    assert (base.nonfinite, base.max_skips, base.debug.dump_batches, base.paths.cache) == (
        "stop",
        3,
        False,
        None,
    )
    assert [Path(base.paths.runs).name, Path(base.paths.data).name] == ["runs", "data"]
    named = (base.model.name, base.data.kind, base.tokenizer.kind, base.optimizer.kind, base.lr_schedule.kind)
    assert named == ("deepseek_v2", "stdlib", "bpe", "adamw", "cosine")
    others = (base.balance.kind, base.mesh.spec, base.backend.name, base.kernels.name, base.pipeline.schedule)
    assert others == ("sequence", "single", "native", "auto", "1f1b")
    rest = (
        base.launcher.name,
        base.precision.name,
        base.determinism.name,
        base.recompute.name,
        base.platform.name,
    )
    assert rest == ("local", "auto", "none", "none", "auto")
    assert (base.evaluation.name, base.logger.kinds, base.container.name) == ("heldout", [], "none")
