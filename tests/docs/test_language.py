"""The project's text claims nothing without a measurement and names nobody's machine."""

from __future__ import annotations

import re
import subprocess

from tests.docs.commands import ROOT

TEXT = (".md", ".py", ".yaml", ".toml", ".cff", ".sh")
FORBIDDEN = {
    "a claim without a measurement": re.compile(
        r"production[- ]ready|state[- ]of[- ]the[- ]art|blazing|lightning[- ]fast|world[- ]class|seamless",
        re.I,
    ),
    "a host of packages or models": re.compile(
        r"pypi\.org|huggingface\.co|anaconda\.org|download\.pytorch\.org", re.I
    ),
    "a directory of somebody's machine": re.compile(r"(?<![\w.$}>*/-])/(Users|work|root|mnt|scratch)/\w"),
    "a promise instead of code": re.compile(r"\b(TODO|FIXME|XXX|TBD)\b"),
}
"""What is wrong → how it is found."""


def faults(text: str) -> list[str]:
    """Names of the faults of a text, each with the words."""
    return [f"{name}: {found[0]}" for name, pattern in FORBIDDEN.items() for found in pattern.finditer(text)]


def test_project_text_has_no_forbidden_words() -> None:
    """All tracked text but this file."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True)
    here = "tests/docs/test_language.py"
    names = [name for name in listed.stdout.splitlines() if name.endswith(TEXT) and name != here]
    paths = [ROOT / name for name in names if (ROOT / name).is_file()]
    assert len(paths) > 50
    assert [f"{path}: {fault}" for path in paths for fault in faults(path.read_text(encoding="utf-8"))] == []


def test_mutation_each_kind_is_found() -> None:
    """One example of each fault, and innocent text beside it."""
    bad = ("It is production-ready.", "see pypi.org", "in /mnt/ann/runs", "# TODO later")
    assert [len(faults(text)) for text in bad] == [1, 1, 1, 1]
    assert faults("sys/fs and ~/.config are fine, a/share/b too.") == []
