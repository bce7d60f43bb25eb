"""DOC-1 to DOC-4: what the documents say of the project is true of the code beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from src.errors import EXIT_CODES
from src.launchers.environment import TABLE
from tests.docs import commands, names
from tests.docs.commands import ROOT
from tests.docs.markdown import Document

DOCUMENTS = sorted(
    path
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("conf/**/*.md"),
        *ROOT.glob("tests/**/*.md"),
    ]
)


def document(tmp_path: Path, text: str) -> Document:
    """A made-up page."""
    path = tmp_path / "README.md"
    path.write_text(text, encoding="utf-8")
    return Document.read(path)


def parser(config: pytest.Config) -> Any:
    """Pytest's own parser of its command line."""
    return config._parser.parse_known_and_unknown_args


@pytest.mark.slow
def test_doc_1_every_command_parses_and_composes(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DOC-1: files exist, the real parser takes the words, runs compose and plan as under dry_run=true."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    seen: dict[tuple[object, ...], commands.Command] = {}
    for path in DOCUMENTS:
        for command in commands.commands(Document.read(path)):
            seen.setdefault((command.words, command.exit_code), command)
    assert len(seen) > 20, "the documents have lost their commands"
    assert [
        problem for command in seen.values() for problem in commands.problems(command, parser(pytestconfig))
    ] == []


def test_doc_1_every_fence_says_what_it_holds() -> None:
    """DOC-1: a command cannot hide in a fence without a language, nor in one of another."""
    wrong = []
    for path in DOCUMENTS:
        page = Document.read(path)
        for fence in page.fences:
            hidden = fence.language not in commands.SHELL and "\npython " in f"\n{fence.text}"
            if fence.language not in commands.LANGUAGES or hidden:
                wrong.append(f"{page.at(fence.line)}: {fence.language or 'no language'}")
            if fence.note not in ("", "run") and not fence.note.startswith("exit "):
                wrong.append(f"{page.at(fence.line)}: unknown note {fence.note!r}")
    assert wrong == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_doc_4_every_path_and_symbol_exists(path: Path) -> None:
    """DOC-4: links lead somewhere; paths, keys, options, classes and functions in code spans are there."""
    assert names.problems(Document.read(path)) == []


BAD_COMMANDS = {
    "option": ("python train.py sead=3", "did you mean seed?"),
    "group": ("python train.py optimiser=sgd", "did you mean optimizer?"),
    "member": ("python train.py optimizer=adam", "optimizer=adamw"),
    "mesh": ("python train.py mesh=pp3ep5", "experts"),
    "job": ("python train.py -m seed=0,1 mesh=single,ep3", "ep=3"),
    "flag": ("python train.py --halp", "--halp"),
    "script": ("python scripts/chekpoints.py list RUN", "does not exist"),
    "verb": ("python scripts/checkpoints.py lst RUN", "invalid choice"),
    "argument": ("python scripts/report.py", "required"),
    "path": ("pytest tests/nowhere", "tests/nowhere does not exist"),
    "marker": ("pytest -m 'not slwo'", "no marker slwo"),
    "pytest": ("pytest --fail-fast", "no option --fail-fast"),
    "extra": ("pip install -e '.[tests]'", "no extra tests"),
    "program": ("pyhton train.py", "unknown program"),
}


@pytest.mark.parametrize("kind", BAD_COMMANDS)
def test_doc_1_mutation_a_wrong_command_fails(kind: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """DOC-1: a page with one wrong word is caught, whatever parser reads that word."""
    line, message = BAD_COMMANDS[kind]
    page = document(tmp_path, f"# Page\n\n```sh\npip install -e . && {line}  # comment\n```\n")
    found = [
        p for command in commands.commands(page) for p in commands.problems(command, parser(pytestconfig))
    ]
    assert len(found) == 1
    assert message in found[0]
    assert found[0].startswith("README.md:4")


def test_doc_1_mutation_a_command_in_a_table_or_sentence_is_seen(tmp_path: Path) -> None:
    """DOC-1: commands stand in tables and sentences too."""
    page = document(tmp_path, "| type | get |\n| --- | --- |\n| `python train.py sed=1` | a run |\n")
    assert [c.arguments for c in commands.commands(page)] == [["train.py", "sed=1"]]


def test_doc_1_mutation_a_refusal_that_is_none_fails(tmp_path: Path) -> None:
    """DOC-1: a command that is shown as refused must be."""
    page = document(tmp_path, "<!-- exit 2 -->\n```sh\npython train.py sead=3\npython train.py seed=3\n```\n")
    refused, accepted = commands.commands(page)
    assert commands.problems(refused) == []
    assert "is not refused" in commands.problems(accepted)[0]


BAD_NAMES = {
    "path": "`src/trainer/lop.py`",
    "folder": "`conf/optimisers/`",
    "link": "[guide](docs/guide.md)",
    "key": "`data.split_sead`",
    "override": "`optimizer.rl=3`",
    "choice": "`kernels=fast`",
    "value": "`seed=abc`",
    "module": "`src.trainer.lop`",
    "member": "`Lease.grab`",
    "function": "`train_stepp()`",
    "class": "`NativeBakend`",
    "run file": "`RUN/metrix.jsonl`",
    "store": "`<paths.data>/tokenz/<key>/`",
    "variable": "`MANYHEAD_SPLIT_SEEDS`",
    "flag": "`--helpp`",
}


@pytest.mark.parametrize("kind", BAD_NAMES)
def test_doc_4_mutation_a_wrong_name_fails(kind: str, tmp_path: Path) -> None:
    """DOC-4: each kind of name is looked up."""
    assert len(names.problems(document(tmp_path, f"Some text {BAD_NAMES[kind]} and more.\n"))) == 1


def test_doc_4_good_names_pass(tmp_path: Path) -> None:
    """DOC-4: the same kinds, spelled right; placeholders, formulas and packages of others are let through."""
    good = (
        "`src/trainer/loop.py` `conf/optimizer/` `data.split_seed` `optimizer.lr=3e-3` `kernels=eager` "
        "`seed=0,1,2` `src.trainer.loop` `Lease.take` `train_step()` `RUN/metrics.jsonl` `pp2ep2` "
        "`<paths.data>/tokens/<key>/` `checkpoints/step-00000100/` `torch.distributed.checkpoint` "
        "`MANYHEAD_SPLIT_SEED` `--help` `conf/*/`"
    )
    assert names.problems(document(tmp_path, good)) == []


def test_exit_3_the_documents_table_is_the_codes() -> None:
    """EXIT-3, DOC-2: the table of exit codes has the codes and meanings of `src/errors.py`, and only them."""
    rows = [line.strip("| ").split(" | ") for line in (ROOT / "docs/exit_codes.md").read_text().splitlines()]
    numbers = {int(row[0]): row[1] for row in rows if row[0].isdigit()}
    assert numbers == EXIT_CODES


def test_doc_2_the_environment_table_has_every_variable() -> None:
    """DOC-2: each row of the environment table is in the document with its reason."""
    text = (ROOT / "docs/environment.md").read_text(encoding="utf-8")
    assert [row.name for row in TABLE if f"| `{row.name}` |" not in text or row.reason not in text] == []
