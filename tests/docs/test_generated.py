"""DOC-2 and DOC-3: generated tables are up to date, and everything that can be set has its sentence."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest

from scripts import generate_docs
from src.compose import config_loader
from src.overrides import Groups
from tests.docs.commands import ROOT

SCHEMA = ("src/config.py", "src/config_compute.py", "src/config_launch.py", "src/models/schema.py")
SENTENCE = re.compile(r"[A-Z0-9`].*[.:]", re.DOTALL)


@pytest.mark.parametrize("path", generate_docs.documents(), ids=lambda path: path.name)
def test_doc_2_generated_tables_are_up_to_date(path: Path) -> None:
    """DOC-2: `python scripts/generate_docs.py` would change nothing."""
    text = path.read_text(encoding="utf-8")
    assert generate_docs.regenerate(text) == text


def test_doc_2_every_generator_is_used() -> None:
    """DOC-2: no table is made for nobody."""
    used = {
        name
        for path in generate_docs.documents()
        for _, name, _ in generate_docs.BLOCK.findall(path.read_text())
    }
    assert used == set(generate_docs.TABLES)


def test_doc_2_mutation_an_edited_table_differs() -> None:
    """DOC-2: a number changed by hand is noticed."""
    text = (ROOT / "docs/exit_codes.md").read_text(encoding="utf-8").replace("| 75 |", "| 76 |")
    assert generate_docs.regenerate(text) != text


def without_sentence(source: str) -> list[str]:
    """Fields and classes without a sentence; a field that is a section has its class's."""
    found = []
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        if not SENTENCE.fullmatch(ast.get_docstring(node) or ""):
            found.append(node.name)
        for item, below in itertools.pairwise([*node.body, ast.Pass()]):
            if isinstance(item, ast.AnnAssign) and not ast.unparse(item.annotation).endswith("Config"):
                text = getattr(getattr(below, "value", None), "value", None)
                if not isinstance(text, str) or not SENTENCE.fullmatch(text):
                    found.append(f"{node.name}.{ast.unparse(item.target)}")
    return found


@pytest.mark.parametrize("name", SCHEMA)
def test_doc_3_every_field_has_a_sentence(name: str) -> None:
    """DOC-3: each key of the schema is followed by a sentence, and each group has one."""
    assert without_sentence((ROOT / name).read_text(encoding="utf-8")) == []


def test_doc_3_mutation_a_field_without_one_is_named() -> None:
    """DOC-3: a key whose sentence is missing or is no sentence is found."""
    class_, fields = (
        'class A:\n    """One."""\n',
        ("x: int", '"""How many."""', "y: int", "z: int", '"""nothing"""'),
    )
    source = class_ + "".join(f"    {line}\n" for line in fields)
    assert without_sentence(source) == ["A.y", "A.z"]


def undescribed(text: str, groups: dict[str, list[str]]) -> list[str]:
    """Groups and options that a page does not name in backticks in a line of at least four words."""
    lines = [line for line in text.splitlines() if len(line.split()) >= 4]
    named = [(set(re.findall(r"`([^`]+)`", line)), line) for line in lines]
    described = {name.partition("=")[2] or name for names, _ in named for name in names} | {
        name for names, _ in named for name in names
    }
    headed = set(re.findall(r"^#+ `?(\w+)`?", text, re.MULTILINE)) | described
    missing = [group for group in groups if group not in headed]
    return missing + [
        f"{group}={name}" for group, names in groups.items() for name in names if name not in described
    ]


def test_doc_3_every_group_and_option_is_described() -> None:
    """DOC-3: `conf/README.md` names each group and each of its options in a sentence."""
    with config_loader() as loader:
        known = Groups(loader)
        groups = {name: known.options(name) for name in known.names}
    assert sum(map(len, groups.values())) > 30
    assert undescribed((ROOT / "conf/README.md").read_text(encoding="utf-8"), groups) == []


def test_doc_3_mutation_an_option_that_is_left_out_is_named() -> None:
    """DOC-3: one option removed from the page is found."""
    text = "## `optimizer`\n\n- `adamw` is the usual choice here.\n- `sgd`\n"
    assert undescribed(text, {"optimizer": ["adamw", "sgd"], "mesh": []}) == ["mesh", "optimizer=sgd"]
