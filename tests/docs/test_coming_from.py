"""DOC-5: what `docs/coming_from.md` says to type here composes, and each of four projects has its table."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest

from src.compose import compose_jobs, config_loader
from src.errors import UserError
from tests.docs.commands import ROOT

PAGE = ROOT / "docs/coming_from.md"
PROJECTS = {
    "primus-cli": ("EXP", "NNODES", "TOKENIZED_DATA_PATH", "PRIMUS_PP", "PRIMUS_EP", "PRIMUS_MODEL"),
    "Pith-Train": ("launch.sh", "pipeline_parallel_size", "moe_load_balance_type", "n_routed_experts"),
    "torchtitan": ("training.steps", "parallelism.data_parallel_shard_degree", "checkpoint.interval"),
    "Megatron-LM": ("--train-iters", "--expert-model-parallel-size", "--moe-router-topk", "--bf16"),
}
"""Heading → names that its tables must have."""


def rows(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Heading, left-hand side and overrides of each row of a table."""
    heading = ""
    for line in text.splitlines():
        heading = line.removeprefix("## ") if line.startswith("## ") else heading
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 3 and cells[0] not in ("there", "---"):
            spans = re.findall(r"`([^`]+)`", cells[1])
            yield heading, cells[0], [word for span in spans for word in shlex.split(span)]


def wrong(found: list[list[str]]) -> str:
    """What composition says of sets of overrides; nothing if all are taken."""
    jobs = [list(words) for words in dict.fromkeys(map(tuple, found))]
    with config_loader() as loader:
        try:
            compose_jobs(loader, jobs)
        except UserError as error:
            return str(error)
    return ""


@pytest.mark.slow
def test_doc_5_each_right_hand_side_composes(monkeypatch: pytest.MonkeyPatch) -> None:
    """DOC-5: every row has overrides, and they compose together as they stand."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    found = list(rows(PAGE.read_text(encoding="utf-8")))
    assert len(found) > 100
    assert [left for _, left, words in found if not words] == []
    assert wrong([words for _, _, words in found]) == ""


def test_doc_5_each_project_has_its_names() -> None:
    """DOC-5: the variables, keys and arguments that people know, under the project's heading."""
    found = list(rows(PAGE.read_text(encoding="utf-8")))
    for project, names in PROJECTS.items():
        left = " ".join(text for heading, text, _ in found if heading == project)
        assert [name for name in names if name not in left] == [], project


def test_doc_5_mutation_a_wrong_override_is_named() -> None:
    """DOC-5: a key, a value or a mesh that cannot be is found."""
    text = (
        "## x\n\n| there | here | remark |\n| --- | --- | --- |\n| a | `mesh=ep3` | |\n| b | `sead=1` | |\n"
    )
    found = [words for _, _, words in rows(text)]
    assert found == [["mesh=ep3"], ["sead=1"]]
    assert "ep=3 does not divide" in wrong(found[:1])
    assert "did you mean seed" in wrong(found[1:])
